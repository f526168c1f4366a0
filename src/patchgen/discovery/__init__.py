"""Category discovery in unlabelled images: scores, clustering of features, and the number of categories."""

from patchgen.discovery.assignment import clustering_accuracy as clustering_accuracy
from patchgen.discovery.kmeans import Estimate as Estimate
from patchgen.discovery.kmeans import SemiSupervisedKMeans as SemiSupervisedKMeans
from patchgen.discovery.kmeans import estimate_num_classes as estimate_num_classes

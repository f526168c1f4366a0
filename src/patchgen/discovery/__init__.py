"""Category discovery in unlabelled images: scores, clustering of features, and the number of categories."""

from patchgen.discovery.assignment import clustering_accuracy as clustering_accuracy
from patchgen.discovery.estimate import Estimate as Estimate
from patchgen.discovery.estimate import estimate_num_classes as estimate_num_classes
from patchgen.discovery.kmeans import SemiSupervisedKMeans as SemiSupervisedKMeans

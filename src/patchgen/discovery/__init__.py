"""Category discovery in unlabelled images: scores, clustering of features, and the number of categories."""

from patchgen.discovery.assignment import accuracy_of_counts as accuracy_of_counts
from patchgen.discovery.assignment import class_mean_accuracy as class_mean_accuracy
from patchgen.discovery.assignment import clustering_accuracy as clustering_accuracy
from patchgen.discovery.assignment import contingency as contingency
from patchgen.discovery.assignment import match as match
from patchgen.discovery.assignment import two_match_accuracy as two_match_accuracy
from patchgen.discovery.estimate import Estimate as Estimate
from patchgen.discovery.estimate import estimate_num_classes as estimate_num_classes
from patchgen.discovery.kmeans import SemiSupervisedKMeans as SemiSupervisedKMeans

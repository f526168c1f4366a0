"""Category discovery in unlabelled images: scores, clustering of features, and the number of categories."""

from patchgen.discovery.assignment import (
    ClusteringAccuracy,
    Contingency,
    accuracy_of_counts,
    class_mean_accuracy,
    class_mean_of_counts,
    clustering_accuracy,
    contingency,
    match,
    two_match_accuracy,
    two_match_of_counts,
)
from patchgen.discovery.estimate import Estimate, estimate_num_classes
from patchgen.discovery.kmeans import SemiSupervisedKMeans

__all__ = [
    "ClusteringAccuracy",
    "Contingency",
    "Estimate",
    "SemiSupervisedKMeans",
    "accuracy_of_counts",
    "class_mean_accuracy",
    "class_mean_of_counts",
    "clustering_accuracy",
    "contingency",
    "estimate_num_classes",
    "match",
    "two_match_accuracy",
    "two_match_of_counts",
]

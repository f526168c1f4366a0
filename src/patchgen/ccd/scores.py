"""Scoring of continual category discovery: the cluster of each image of a stage, and its accuracy.

Semi-supervised k-means pins images of stage 0 to their class and images of earlier stages to their earlier cluster. All
scores use the same match of clusters to classes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchgen.ccd.data import Stream
from patchgen.discovery import SemiSupervisedKMeans
from patchgen.discovery.assignment import contingency, hits_of
from patchgen.discovery.kmeans import cluster_sums, nearest


class Clusters(NamedTuple):
    """Clusters of a stage; an id below the number of labelled classes is a class, the others were discovered."""

    assignment: np.ndarray  # (N,) id of each image's cluster
    ids: np.ndarray  # (K,) id of each centre
    centres: Tensor  # (K, D)

    def predict(self, features: Tensor) -> np.ndarray:
        """Ids (M,) of the nearest centres for other images."""
        return self.ids[nearest(features, self.centres)[1].numpy()]


def discover(
    features: Tensor,
    labelled: Tensor,
    labels: np.ndarray,
    clusters: int,
    first_new: int,
    inits: int = 10,
    seed: int = 1,
) -> Clusters:
    """Cluster the images of a stage (N, D), given all images (M, D) that already have a class or a cluster (M,)."""
    kmeans = SemiSupervisedKMeans(max(clusters, len(np.unique(labels))), inits=inits, seed=seed)
    kmeans.fit(features, labelled, labels)
    old = np.array(kmeans.labelled_classes, dtype=np.int64)
    ids = np.concatenate([old, first_new + np.arange(kmeans.num_clusters - len(old))])
    return Clusters(ids[kmeans.assignment.cpu().numpy()], ids, kmeans.centres.cpu())


def class_means(features: Tensor, label: np.ndarray, classes: int) -> Tensor:
    """Mean feature (C, D) of each of the classes 0..C-1."""
    sums, counts = cluster_sums(features, torch.from_numpy(label).to(features.device), classes)
    return (sums / counts.clamp(min=1).unsqueeze(1)).to(features.dtype)


def score(truth: np.ndarray, assignment: np.ndarray, entry: np.ndarray, stage: int) -> dict[str, Any]:
    """All scores of class ids (N,) and arbitrary cluster ids (N,), where `entry` (C,) is the stage of each class.

    {"all": cell, "hard": {"known": cell, "unknown": cell}, "soft": {...}, "groups": {"0": cell, ...}, "nmi", "ari"}
    where a cell is {"accuracy", "error", "images"}; cells without images are left out. Known are the classes of stage 0
    ("hard"), or those of all stages before this one ("soft").
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    table = contingency(truth, assignment)
    hits, total = hits_of(table.counts), table.counts.sum(1)
    came = entry[np.array(table.classes, dtype=np.int64)]  # (C',) of the classes that occur

    def cells(groups: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
        return {name: _cell(hits[of].sum(), total[of].sum()) for name, of in groups.items() if total[of].sum()}

    return {
        "all": _cell(hits.sum(), total.sum()),
        "hard": cells({"known": came == 0, "unknown": came != 0}),
        "soft": cells({"known": came < max(stage, 1), "unknown": came >= max(stage, 1)}),
        "groups": cells({str(group): came == group for group in np.unique(came)}),
        "nmi": float(normalized_mutual_info_score(truth, assignment)),
        "ari": float(adjusted_rand_score(truth, assignment)),
    }


def _cell(right: float, images: float) -> dict[str, float]:
    """An accuracy with the standard error of a proportion: sqrt(p (1 - p) / n)."""
    share = float(right / images)
    return {"accuracy": share, "error": math.sqrt(share * (1 - share) / images), "images": int(images)}


def forgetting(earlier: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> dict[str, float]:
    """Drop of each entry group from its best accuracy in earlier scores: {"0": 0.05, ...}; negative if it rose."""
    drops = {}
    for group, cell in now["groups"].items():
        before = [past["groups"][group]["accuracy"] for past in earlier if group in past["groups"]]
        if before:
            drops[group] = max(before) - cell["accuracy"]
    return drops


def validation_score(truth: np.ndarray, assignment: np.ndarray, known: np.ndarray) -> float:
    """Accuracy on images of known classes, matched on these alone: labels of new classes are not used."""
    is_known = np.isin(truth, known)
    counts = contingency(truth[is_known], assignment[is_known]).counts
    return float(hits_of(counts).sum() / counts.sum())


def halve_held_out(stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """Held-out rows for selecting the epoch, and those for scoring it: alternating images of each class."""
    label = stream.label[stream.held_out]
    selecting = np.zeros(len(label), dtype=bool)
    for c in np.unique(label):
        selecting[np.flatnonzero(label == c)[1::2]] = True
    return stream.held_out[selecting], stream.held_out[~selecting]

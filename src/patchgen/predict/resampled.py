"""The metrics of `patchgen.tasks.metrics` under weights, for the thousands of draws of a bootstrap.

The reported metrics come from scikit-learn, whose functions spend a millisecond each on checking arguments. A bootstrap
needs the same metrics thousands of times: here the sorting is done once, and a resample is a few sums. Tests compare
both.
"""

from __future__ import annotations

import numpy as np

from patchgen.tasks.metrics import RANKED

Values = list[float | None]


def divide(part: np.ndarray, whole: np.ndarray) -> Values:
    """part / whole; None where the whole is 0."""
    return [float(p / w) if w else None for p, w in zip(part, whole, strict=True)]


def counted(confusion: np.ndarray) -> dict[str, Values]:
    """As `class_counts`: precision, recall, specificity and F1 of each class of a confusion matrix (C, C)."""
    hits, true, said, total = np.diag(confusion), confusion.sum(1), confusion.sum(0), confusion.sum()
    return {
        "precision": divide(hits, said),
        "recall": divide(hits, true),
        "specificity": divide(total - true - said + hits, total - true),
        "f1": divide(2 * hits, true + said),
    }


class Ranking:
    """As `class_ranking` for one set of labels and probabilities, under any weights.

    Args:
        label: (N,) true class.
        probabilities: (N, C).
    """

    def __init__(self, label: np.ndarray, probabilities: np.ndarray) -> None:
        self.classes = [_Sorted(label == c, probabilities[:, c]) for c in range(probabilities.shape[1])]

    def __call__(self, weights: np.ndarray) -> dict[str, Values]:
        """AUROC and average precision of each class, each image counting `weights` (N,) times."""
        pairs = [one(weights) for one in self.classes]
        return {name: list(values) for name, values in zip(RANKED, zip(*pairs, strict=True), strict=True)}


class _Sorted:
    """Images by the falling probability of one class; those of equal probability share a threshold."""

    def __init__(self, own: np.ndarray, probability: np.ndarray) -> None:
        self.order = np.argsort(-probability, kind="stable")
        self.own = own[self.order]
        self.last = np.flatnonzero(np.append(np.diff(probability[self.order]) != 0, True))  # of each threshold

    def __call__(self, weights: np.ndarray) -> tuple[float | None, float | None]:
        weights = weights[self.order]
        seen = np.cumsum(weights)[self.last]
        hits = np.cumsum(weights * self.own)[self.last]
        others = seen - hits
        if not hits[-1] or not others[-1]:
            return None, None
        gained, before = np.diff(hits, prepend=0), np.append(0, hits[:-1])
        area = np.diff(others, prepend=0) @ (hits + before) / 2  # trapezoids under the ROC curve
        precision = hits / np.maximum(seen, 1)
        return float(area / hits[-1] / others[-1]), float(gained @ precision / hits[-1])

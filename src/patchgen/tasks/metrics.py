"""Scores, by scikit-learn: of a confusion matrix, of probabilities, and of masks against the truth.

    scores(confusion)                                   # (C, C), rows true, columns predicted
    probability_scores(label, probabilities)            # (N,) and (N, C): AUROC, average precision, calibration error
    reliability(confidence, right)                      # the bins behind the calibration error

A score that is undefined is None, never NaN: the AUROC of a class needs images of that class and of another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BINS = 15  # of the expected calibration error
COUNTED = ("accuracy", "balanced_accuracy", "macro_f1")  # what a confusion matrix gives
RANKED = ("auroc", "average_precision")  # what the order of probabilities gives


# Confusion matrices


def accuracy(confusion: np.ndarray) -> float:
    return float(np.trace(confusion) / max(confusion.sum(), 1))


def per_class_accuracy(confusion: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
    total = confusion.sum(1)
    return {name: float(confusion[i, i] / total[i]) for i, name in enumerate(classes) if total[i]}


def scores(confusion: np.ndarray, positive: int | None = None) -> dict[str, float]:
    """Accuracy, balanced accuracy, macro F1 and F1 of a confusion matrix (C, C); all 0 where nothing was scored.

    Balanced accuracy is the mean recall of the classes that have images, macro F1 the mean over the classes that are
    true or predicted at least once. ``f1`` is that of the class `positive`, or the macro F1 where none is named.
    """
    from sklearn.metrics import f1_score, recall_score

    true, predicted = np.nonzero(confusion)  # cells that hold images, each weighted by their number
    weights = confusion[true, predicted]
    found = {"accuracy": accuracy(confusion), "balanced_accuracy": 0.0, "macro_f1": 0.0}
    if len(true):
        kind = {"average": "macro", "sample_weight": weights, "zero_division": 0}
        found["balanced_accuracy"] = float(recall_score(true, predicted, labels=np.unique(true), **kind))
        found["macro_f1"] = float(f1_score(true, predicted, **kind))
    f1 = found["macro_f1"]
    if positive is not None and len(true):
        hit = {"sample_weight": weights, "zero_division": 0}
        f1 = float(f1_score(true == positive, predicted == positive, **hit))
    return {**found, "f1": f1, "images": int(confusion.sum())}


# Probabilities


def class_ranking(is_class: np.ndarray, probability: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float | None]:
    """One class against the rest: AUROC and average precision of its probability (N,); None where undefined."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    counted = is_class if weights is None else is_class[weights > 0]
    if not counted.any() or counted.all():
        return dict.fromkeys(RANKED)
    measures = {"auroc": roc_auc_score, "average_precision": average_precision_score}
    return {name: float(measure(is_class, probability, sample_weight=weights)) for name, measure in measures.items()}


def ranking(label: np.ndarray, probabilities: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float | None]:
    """Macro AUROC and average precision, one class against the rest, over the classes for which they are defined.

    Args:
        label: (N,) true class.
        probabilities: (N, C).
        weights: (N,) how often each image counts.
    """
    classes = range(probabilities.shape[1])
    found = [class_ranking(label == c, probabilities[:, c], weights) for c in classes]
    means: dict[str, float | None] = {}
    for name in RANKED:
        defined = [value for one in found if (value := one[name]) is not None]
        means[name] = float(np.mean(defined)) if defined else None
    return means


class Bin(NamedTuple):
    """Images whose confidence lies in (low, high]; the means are None where there are none."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean
    accuracy: float | None


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Equal bins of confidence (N,) with the share of images in them that are `right` (N,)."""
    edges = np.linspace(0, 1, bins + 1)
    which = np.searchsorted(edges[1:-1], confidence)  # as scikit-learn's calibration_curve: (low, high]
    images = np.bincount(which, minlength=bins)
    sums = [np.bincount(which, np.asarray(values, dtype=float), bins) for values in (confidence, right)]
    means = [[float(s / n) if n else None for s, n in zip(column, images, strict=True)] for column in sums]
    return [Bin(*map(float, edges[i : i + 2]), int(images[i]), means[0][i], means[1][i]) for i in range(bins)]


def calibration_error(probabilities: np.ndarray, label: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their images."""
    confidence = probabilities.max(1).astype(float)
    found = reliability(confidence, probabilities.argmax(1) == label, bins)
    gaps = [b.images * abs(b.confidence - b.accuracy) for b in found if b.confidence is not None and b.accuracy is not None]
    return float(sum(gaps) / len(label))


def probability_scores(label: np.ndarray, probabilities: np.ndarray) -> dict[str, float | None]:
    """Macro AUROC and average precision, and the calibration error, of labels (N,) and probabilities (N, C)."""
    return {**ranking(label, probabilities), "calibration_error": calibration_error(probabilities, label)}


# Masks


def mask_recovery(mask: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """How well masks (B, P) find the predictive patches ``truth`` (B, P); one value an image, NaN where undefined.

    ``auroc``: does the mask rank predictive patches higher; undefined where all patches or none are predictive.
    ``iou``: of {mask >= 0.5} and the truth. ``error``: mean |m - m*|, the paper's epsilon. ``kept``: share of the
    predictive patches with a mask of at least 0.5.
    """
    from scipy.stats import rankdata

    inside = truth.sum(1)
    outside = truth.shape[1] - inside
    ranks = np.where(truth, rankdata(mask, axis=1), 0).sum(1)  # ties share their mean rank
    chosen = mask >= 0.5
    both = (chosen & truth).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "auroc": (ranks - inside * (inside + 1) / 2) / (inside * outside),
            "iou": both / (chosen | truth).sum(1),
            "error": np.abs(mask - truth).mean(1),
            "kept": both / inside,
        }

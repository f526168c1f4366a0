"""Scores of a confusion matrix, of probabilities, and of masks against the truth.

    scores(confusion)                                   # (C, C), rows true, columns predicted
    probability_scores(label, probabilities)            # (N,) and (N, C): AUROC, average precision, calibration error
    reliability(confidence, right)                      # the bins of the calibration error

A score that is undefined is None, never NaN: the AUROC of a class needs images of that class and of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BINS = 15  # of the expected calibration error
RANKED = ("auroc", "average_precision")  # scores that depend only on the order of probabilities


# Confusion matrices


def accuracy(confusion: np.ndarray) -> float:
    return float(np.trace(confusion) / max(confusion.sum(), 1))


def per_class_accuracy(confusion: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
    total = confusion.sum(1)
    return {name: float(confusion[i, i] / total[i]) for i, name in enumerate(classes) if total[i]}


def class_counts(confusion: np.ndarray) -> dict[str, list[float | None]]:
    """Precision, recall, specificity and F1 of each class of a confusion matrix (C, C); None where undefined."""
    hits, true, predicted, total = np.diag(confusion), confusion.sum(1), confusion.sum(0), confusion.sum()
    shares = {
        "precision": (hits, predicted),
        "recall": (hits, true),
        "specificity": (total - true - predicted + hits, total - true),
        "f1": (2 * hits, true + predicted),
    }
    return {name: [float(p / w) if w else None for p, w in zip(*pair, strict=True)] for name, pair in shares.items()}


def scores(confusion: np.ndarray, positive: int | None = None) -> dict[str, float]:
    """Accuracy, balanced accuracy, macro F1 and F1 of a confusion matrix (C, C); all 0 if nothing was scored.

    Balanced accuracy is the mean recall of the classes that have images, macro F1 the mean over the classes that are
    true or predicted at least once. ``f1`` is that of the class `positive`, or the macro F1 by default.
    """
    if not confusion.any():
        return {"accuracy": 0.0, "balanced_accuracy": 0.0, "macro_f1": 0.0, "f1": 0.0, "images": 0}
    counts = class_counts(confusion)
    macro = mean(counts["f1"])
    return {
        "accuracy": accuracy(confusion),
        "balanced_accuracy": mean(counts["recall"]) or 0.0,
        "macro_f1": macro or 0.0,
        "f1": (macro if positive is None else counts["f1"][positive]) or 0.0,
        "images": int(confusion.sum()),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the defined values."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


# Probabilities


def class_ranking(
    label: np.ndarray, probabilities: np.ndarray, weights: np.ndarray | None = None
) -> dict[str, list[float | None]]:
    """AUROC and average precision of each class against the rest; None where undefined.

    Args:
        label: (N,) true class.
        probabilities: (N, C).
        weights: (N,) weight of each image.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    found: dict[str, list[float | None]] = {name: [None] * probabilities.shape[1] for name in RANKED}
    present = np.unique(label if weights is None else label[weights > 0])
    for c in present if len(present) > 1 else ():
        own, said = label == c, probabilities[:, c]
        found["average_precision"][c] = float(average_precision_score(own, said, sample_weight=weights))
        if probabilities.shape[1] == 2 and c == 1:  # the same as for the other class
            found["auroc"][1] = found["auroc"][0]
        else:
            found["auroc"][c] = float(roc_auc_score(own, said, sample_weight=weights))
    return found


def ranking(label: np.ndarray, probabilities: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float | None]:
    """Macro AUROC and average precision: the means of `class_ranking` over the classes for which it is defined."""
    return {name: mean(values) for name, values in class_ranking(label, probabilities, weights).items()}


class Bin(NamedTuple):
    """Images with confidence in (low, high]; the means are None if there are none."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean
    accuracy: float | None


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Equal bins of confidence (N,), each with the share of its images that are `right` (N,)."""
    edges = np.linspace(0, 1, bins + 1)
    which = np.searchsorted(edges[1:-1], confidence)  # as scikit-learn's calibration_curve: (low, high]
    images = np.bincount(which, minlength=bins)
    sums = [np.bincount(which, np.asarray(values, dtype=float), bins) for values in (confidence, right)]
    means = [[float(s / n) if n else None for s, n in zip(column, images, strict=True)] for column in sums]
    return [Bin(float(edges[i]), float(edges[i + 1]), int(images[i]), means[0][i], means[1][i]) for i in range(bins)]


def calibration_error(probabilities: np.ndarray, label: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their images."""
    confidence = probabilities.max(1).astype(float)
    found = reliability(confidence, probabilities.argmax(1) == label, bins)
    gaps = [
        b.images * abs(b.confidence - b.accuracy) for b in found if b.confidence is not None and b.accuracy is not None
    ]
    return float(sum(gaps) / len(label))


def probability_scores(label: np.ndarray, probabilities: np.ndarray) -> dict[str, float | None]:
    """Macro AUROC and average precision, and the calibration error, of labels (N,) and probabilities (N, C)."""
    return {**ranking(label, probabilities), "calibration_error": calibration_error(probabilities, label)}


# Masks


def mask_recovery(mask: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """How well masks (B, P) recover the predictive patches ``truth`` (B, P); one value per image, NaN if undefined.

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

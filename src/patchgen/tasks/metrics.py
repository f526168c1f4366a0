"""Scores of a confusion matrix (C, C), rows true, columns predicted, of probabilities, and of masks against the truth.

A score that is undefined is None, never NaN: the AUROC of a class needs images of that class and of another.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

BINS = 15  # of the expected calibration error


# Confusion matrices


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
    """Of (C, C): accuracy, balanced over classes with images, macro F1 of those true or predicted, and F1."""
    if not confusion.any():
        return {"accuracy": 0.0, "balanced_accuracy": 0.0, "macro_f1": 0.0, "f1": 0.0, "images": 0}
    counts = class_counts(confusion)
    macro = mean(counts["f1"])
    return {
        "accuracy": float(np.trace(confusion) / confusion.sum()),
        "balanced_accuracy": mean(counts["recall"]) or 0.0,
        "macro_f1": macro or 0.0,
        "f1": (macro if positive is None else counts["f1"][positive]) or 0.0,
        "images": int(confusion.sum()),
    }


def mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


# Probabilities


Falling = tuple[np.ndarray, np.ndarray, np.ndarray]


def falling(label: np.ndarray, probabilities: np.ndarray) -> Iterator[Falling]:
    """For each class, the order (N,) of falling probability, whether its images come there, and where ties end."""
    for c, probability in enumerate(probabilities.T):
        order = np.argsort(-probability, kind="stable")
        yield order, label[order] == c, np.flatnonzero(np.append(np.diff(probability[order]) != 0, True))


def class_ranking(classes: Iterable[Falling], weights: np.ndarray | None = None) -> dict[str, list[float | None]]:
    """scikit-learn's AUROC and average precision of each class against the rest; images count `weights` (N,) times."""
    auroc, average_precision = map(list, zip(*(_areas(weights, *each) for each in classes), strict=True))
    if len(auroc) == 2:
        auroc[1] = auroc[0]  # the same, up to the rounding of the probabilities
    return {"auroc": auroc, "average_precision": average_precision}


def _areas(
    weights: np.ndarray | None, order: np.ndarray, is_class: np.ndarray, last: np.ndarray
) -> tuple[float | None, float | None]:
    """AUROC and average precision of one class, None where undefined."""
    weights = np.ones(len(order)) if weights is None else weights[order]
    seen, hits = np.cumsum(weights)[last], np.cumsum(weights * is_class)[last]
    others = seen - hits
    if not hits[-1] or not others[-1]:
        return None, None
    gained, before = np.diff(hits, prepend=0), np.append(0, hits[:-1])
    area = np.diff(others, prepend=0) @ (hits + before) / 2  # trapezoids under the ROC curve
    return float(area / hits[-1] / others[-1]), float(gained @ (hits / np.maximum(seen, 1)) / hits[-1])


class Bin(NamedTuple):
    """Images with confidence in (low, high]; the means are None if there are none."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean
    accuracy: float | None


def reliability(confidence: np.ndarray, right: np.ndarray) -> list[Bin]:
    """Equal bins of confidence (N,), each with the share of its images that are `right` (N,)."""
    edges = np.linspace(0, 1, BINS + 1)
    which = np.searchsorted(edges[1:-1], confidence)  # as scikit-learn's calibration_curve: (low, high]
    images = np.bincount(which, minlength=BINS)
    sums = [np.bincount(which, np.asarray(values, dtype=float), BINS) for values in (confidence, right)]
    means = [[float(s / n) if n else None for s, n in zip(column, images, strict=True)] for column in sums]
    return [Bin(float(edges[i]), float(edges[i + 1]), int(images[i]), means[0][i], means[1][i]) for i in range(BINS)]


def calibration_error(probabilities: np.ndarray, label: np.ndarray) -> float:
    """Expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their images."""
    confidence = probabilities.max(1).astype(float)
    filled = [b for b in reliability(confidence, probabilities.argmax(1) == label) if b.images]
    return float(sum(b.images * abs(b.confidence - b.accuracy) for b in filled) / len(label))  # type: ignore[operator]


def probability_scores(label: np.ndarray, probabilities: np.ndarray) -> dict[str, float | None]:
    """Macro AUROC and average precision, and the calibration error, of labels (N,) and probabilities (N, C)."""
    ranks = {name: mean(values) for name, values in class_ranking(falling(label, probabilities)).items()}
    return {**ranks, "calibration_error": calibration_error(probabilities, label)}


# Masks


def mask_recovery(mask: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """How well masks (B, P) recover the predictive patches ``truth`` (B, P); one value per image, NaN if undefined."""
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
            "error": np.abs(mask - truth).mean(1),  # the paper's epsilon
            "kept": both / inside,  # share of the predictive patches
        }

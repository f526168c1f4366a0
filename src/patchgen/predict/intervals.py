"""Bootstrap 95 % intervals by resampling patients, or images if patients are unknown, and metrics fast enough for it.

    bootstrap(lambda weights: {"accuracy": float(np.average(right, weights=weights))}, patient, resamples=1000)

Images of a patient are similar, so patients are resampled: all images of a patient that is drawn twice count twice. The
interval is between the 2.5th and 97.5th percentile. scikit-learn's metrics spend a millisecond each on checking their
arguments; here the sorting is done once, and a resample is a few sums. Tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from patchgen.tasks.metrics import RANKED

LEVEL = 0.95
SEED = 20

Statistic = Callable[[np.ndarray], Mapping[str, float | None]]  # weights (N,) -> named values; None: undefined
Values = list[float | None]


def bootstrap(
    statistic: Statistic, unit: np.ndarray, resamples: int, tick: Callable[[int], None] | None = None
) -> dict[str, tuple[float, float] | None]:
    """Intervals of the values of `statistic`.

    Args:
        statistic: Called with the number of times that each image (N,) counts in a resample.
        unit: (N,) the patient of each image, as 0 .. K-1.
        resamples: Number of resamples; 0 gives no interval.
        tick: Called with 1 after each resample.

    Returns:
        None for a value that is undefined in more than half of the resamples; an empty dict with fewer than two units.
    """
    units = int(unit.max()) + 1 if len(unit) else 0
    if units < 2:
        return {}
    rng, drawn = np.random.default_rng(SEED), list[Mapping[str, float | None]]()
    for _ in range(resamples):
        times = np.bincount(rng.integers(units, size=units), minlength=units)
        drawn.append(statistic(times[unit]))
        if tick:
            tick(1)
    return {name: _interval([values[name] for values in drawn]) for name in (drawn[0] if drawn else ())}


def _interval(values: list[float | None]) -> tuple[float, float] | None:
    defined = [value for value in values if value is not None]
    if 2 * len(defined) < len(values):
        return None
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def counted(confusion: np.ndarray) -> dict[str, Values]:
    """As `class_counts`: precision, recall, specificity and F1 of each class of a confusion matrix (C, C)."""
    hits, true, predicted, total = np.diag(confusion), confusion.sum(1), confusion.sum(0), confusion.sum()
    return {
        "precision": _divide(hits, predicted),
        "recall": _divide(hits, true),
        "specificity": _divide(total - true - predicted + hits, total - true),
        "f1": _divide(2 * hits, true + predicted),
    }


def _divide(part: np.ndarray, whole: np.ndarray) -> Values:
    """part / whole; None where the whole is 0."""
    return [float(p / w) if w else None for p, w in zip(part, whole, strict=True)]


class Ranking:
    """As `class_ranking` for one set of labels (N,) and probabilities (N, C), under any weights.

    Images are sorted once by the falling probability of each class; those of equal probability share a threshold.
    """

    def __init__(self, label: np.ndarray, probabilities: np.ndarray) -> None:
        self.classes = []
        for c, probability in enumerate(probabilities.T):
            order = np.argsort(-probability, kind="stable")
            last = np.flatnonzero(np.append(np.diff(probability[order]) != 0, True))  # of each threshold
            self.classes.append((order, label[order] == c, last))

    def __call__(self, weights: np.ndarray) -> dict[str, Values]:
        """AUROC and average precision of each class, each image counting `weights` (N,) times."""
        pairs = [_areas(weights[order], is_class, last) for order, is_class, last in self.classes]
        return {name: list(values) for name, values in zip(RANKED, zip(*pairs, strict=True), strict=True)}


def _areas(weights: np.ndarray, is_class: np.ndarray, last: np.ndarray) -> tuple[float | None, float | None]:
    seen, hits = np.cumsum(weights)[last], np.cumsum(weights * is_class)[last]
    others = seen - hits
    if not hits[-1] or not others[-1]:
        return None, None
    gained, before = np.diff(hits, prepend=0), np.append(0, hits[:-1])
    area = np.diff(others, prepend=0) @ (hits + before) / 2  # trapezoids under the ROC curve
    return float(area / hits[-1] / others[-1]), float(gained @ (hits / np.maximum(seen, 1)) / hits[-1])

"""Scores from a confusion matrix: rows are true classes, columns predictions."""

from __future__ import annotations

import numpy as np


def accuracy(confusion: np.ndarray) -> float:
    return float(np.trace(confusion) / max(confusion.sum(), 1))


def f1(confusion: np.ndarray) -> float:
    """F1 of the second class where there are two (HISTOPANTUM's rule), else the mean over classes that occur."""
    hits = np.diag(confusion).astype(float)
    either = confusion.sum(0) + confusion.sum(1)
    scores = 2 * hits / np.maximum(either, 1)
    return float(scores[1] if len(hits) == 2 else scores[either > 0].mean()) if confusion.sum() else 0.0


def per_class_accuracy(confusion: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
    total = confusion.sum(1)
    return {name: float(confusion[i, i] / total[i]) for i, name in enumerate(classes) if total[i]}


def scores(confusion: np.ndarray, loss: float | None = None) -> dict[str, float]:
    found = {"accuracy": accuracy(confusion), "f1": f1(confusion), "images": int(confusion.sum())}
    return found if loss is None else {**found, "loss": loss}

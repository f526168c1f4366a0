"""Scores: of predictions from a confusion matrix (rows true, columns predicted), and of masks against the truth."""

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


def scores(confusion: np.ndarray) -> dict[str, float]:
    return {"accuracy": accuracy(confusion), "f1": f1(confusion), "images": int(confusion.sum())}


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

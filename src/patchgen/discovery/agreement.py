"""Agreement of clusters and classes without matching them: normalised mutual information, adjusted Rand index."""

from __future__ import annotations

from typing import Any

import numpy as np

from patchgen.discovery.assignment import contingency


def nmi(y_true: Any, y_pred: Any) -> float:
    """Mutual information over the mean of the two entropies: 1 for the same partition, 0 for independent ones."""
    return nmi_of_counts(contingency(y_true, y_pred).counts)


def ari(y_true: Any, y_pred: Any) -> float:
    """Rand index adjusted for chance: 1 for the same partition, about 0 for a random one, possibly negative."""
    return ari_of_counts(contingency(y_true, y_pred).counts)


def nmi_of_counts(counts: Any) -> float:
    """`nmi` of a matrix classes x clusters."""
    joint = _counted(counts) / np.sum(counts)
    rows, columns = joint.sum(1), joint.sum(0)
    mean_entropy = (_entropy(rows) + _entropy(columns)) / 2
    if mean_entropy == 0:  # one class in one cluster
        return 1.0
    return float(max(0.0, 2 - _entropy(joint.ravel()) / mean_entropy))  # I = H(rows) + H(columns) - H(joint)


def ari_of_counts(counts: Any) -> float:
    """`ari` of a matrix classes x clusters."""
    table = _counted(counts)
    together = _pairs(table).sum()
    same_class, same_cluster = _pairs(table.sum(1)).sum(), _pairs(table.sum(0)).sum()
    largest = (same_class + same_cluster) / 2
    by_chance = same_class * same_cluster / max(_pairs(table.sum()), 1)
    return float((together - by_chance) / (largest - by_chance)) if largest != by_chance else 1.0


def _counted(counts: Any) -> np.ndarray:
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2 or not table.sum() > 0 or table.min() < 0:
        raise ValueError(f"counts must be a matrix of numbers that are not negative nor all 0, shape {table.shape}")
    return table


def _entropy(shares: np.ndarray) -> float:
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum())


def _pairs(numbers: np.ndarray) -> np.ndarray:
    return numbers * (numbers - 1) / 2

"""Accuracy of discovered categories: clusters are matched to classes, then counted for all, known and unknown classes.

A cluster has no name: it is matched to the class that gives the most correct samples (Hungarian algorithm), in one
match over all samples, the strict definition of the field ("v2").
"""

import contextlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np


class ClusteringAccuracy(NamedTuple):
    """Fractions in [0, 1]; NaN without such samples."""

    all: float
    known: float
    unknown: float


class Contingency(NamedTuple):
    counts: np.ndarray  # (C, P) samples of class i in cluster j
    classes: list[Hashable]  # ids of the rows
    clusters: list[Hashable]  # ids of the columns


def clustering_accuracy(y_true: Any, y_pred: Any, known_classes: Any) -> ClusteringAccuracy:
    """Accuracy under one Hungarian match over all samples; of equally good matches, one of them.

    Args:
        y_true: class of each sample (N,); list, array or tensor of any hashable ids.
        y_pred: cluster of each sample (N,); its ids need not be those of the classes.
        known_classes: ids of the classes that had labels; they need not occur in ``y_true``.

    Example:
        >>> clustering_accuracy(["cat", "cat", "dog", "eel"], [7, 7, 3, 3], known_classes=["cat"])
        ClusteringAccuracy(all=0.75, known=1.0, unknown=0.5)
    """
    counts, classes, _ = contingency(y_true, y_pred)
    if isinstance(known_classes, str) or not hasattr(known_classes, "__iter__"):
        raise ValueError(f"known_classes lists the ids of the known classes, such as range(70), not {known_classes!r}")
    known = _values(known_classes)
    kinds = [{(isinstance(name, str), isinstance(name, bool)) for name in names} for names in (known, classes)]
    if known and kinds[0].isdisjoint(kinds[1]):
        raise ValueError(
            f"known_classes and y_true must use the same ids, not {known[0]!r} and {classes[0]!r}: names in both, or "
            "numbers in both, and no mask of samples"
        )
    return accuracy_of_counts(counts, np.array([name in set(known) for name in classes]))


def accuracy_of_counts(counts: np.ndarray, known: np.ndarray) -> ClusteringAccuracy:
    """`clustering_accuracy` of ``counts`` (C, P); ``known`` (C,) is true for rows of known classes."""
    hits, total = hits_of(counts), counts.sum(1)
    sums = [(hits[rows].sum(), total[rows].sum()) for rows in (np.ones_like(known), known, ~known)]
    return ClusteringAccuracy(*(float(part / whole) if whole else float("nan") for part, whole in sums))


def contingency(y_true: Any, y_pred: Any) -> Contingency:
    """Number of samples of each class in each cluster."""
    true, classes = encode(y_true, "y_true")
    pred, clusters = encode(y_pred, "y_pred")
    if len(true) != len(pred):
        raise ValueError(f"y_true and y_pred must be of one length, not {len(true)} and {len(pred)}")
    if not len(true):
        raise ValueError("y_true and y_pred are empty: there is nothing to score")
    cells = np.bincount(true * len(clusters) + pred, minlength=len(classes) * len(clusters))
    return Contingency(cells.reshape(len(classes), len(clusters)), classes, clusters)


def match(counts: np.ndarray) -> np.ndarray:
    """The class (row) of each cluster (column) of ``counts`` (C, P), (P,); -1 for one that matches none."""
    from scipy.optimize import linear_sum_assignment

    row, column = linear_sum_assignment(counts, maximize=True)
    matched = np.full(counts.shape[1], -1)
    matched[column] = np.where(counts[row, column] > 0, row, -1)
    return matched


def hits_of(counts: np.ndarray) -> np.ndarray:
    """Number of samples of each class in the cluster matched to it, (C,)."""
    row = match(counts)
    column = np.flatnonzero(row >= 0)
    hits = np.zeros(len(counts))
    hits[row[column]] = counts[row[column], column]
    return hits


def encode(ids: Any, what: str) -> tuple[np.ndarray, list[Hashable]]:
    """Position (N,) of each id in the list of distinct ids, and that list: sorted, or by appearance if mixed."""
    if (shape := getattr(ids, "shape", None)) is not None and len(shape) != 1:
        raise ValueError(f"{what} must hold one id a sample, shape (N,), not {tuple(shape)}")
    values = _values(ids)
    try:
        distinct = list(dict.fromkeys(values))
    except TypeError as error:
        raise ValueError(f"{what} must hold one hashable id a sample (a number, a name): {error}") from None
    if any(value != value for value in distinct):
        raise ValueError(f"{what} holds NaN, which is no id: leave these samples out or give them one")
    with contextlib.suppress(TypeError):
        distinct = sorted(distinct)
    position = {value: i for i, value in enumerate(distinct)}
    return np.fromiter((position[value] for value in values), np.int64, len(values)), distinct


def _values(ids: Any) -> list[Any]:
    """A list of Python values; a one-element tensor or array inside a list becomes its number."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    return [value.item() if hasattr(value, "item") else value for value in values]

"""Accuracy of discovered categories: clusters are matched to classes, then counted for all, known and unknown classes.

    clustering_accuracy(y_true, y_pred, known_classes=range(70)).known     # the field's strict score, one joint match

A cluster has no name, so the score uses the one-to-one match of clusters to classes with the most correct samples
(Hungarian algorithm). `clustering_accuracy` makes ONE match over all samples, also for known and unknown classes. Two
other scores in the literature are not comparable with it: `class_mean_accuracy` (the same match, every class has the
same weight) and `two_match_accuracy` (older: known and unknown are matched separately, so a cluster may be used twice
and the score is never lower).
"""

from __future__ import annotations

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
    """Samples of class i in cluster j, `counts` (C, P), and the ids of its rows and columns."""

    counts: np.ndarray
    classes: list[Hashable]
    clusters: list[Hashable]


def clustering_accuracy(y_true: Any, y_pred: Any, known_classes: Any) -> ClusteringAccuracy:
    """Accuracy under one Hungarian match over all samples jointly ("v2", the strict definition).

    If several matches are equally good for all samples, known and unknown are those of one of them.

    Args:
        y_true: class of each sample (N,); list, array or tensor of any hashable ids.
        y_pred: cluster of each sample (N,); its ids need not be those of the classes.
        known_classes: ids of the classes that had labels; they need not occur in ``y_true``.

    Raises:
        ValueError: no samples, another number of clusters than classes given, or a mask in place of class ids.

    Example:
        >>> clustering_accuracy(["cat", "cat", "dog", "eel"], [7, 7, 3, 3], known_classes=["cat"])
        ClusteringAccuracy(all=0.75, known=1.0, unknown=0.5)
    """
    return accuracy_of_counts(*_counts_and_known(y_true, y_pred, known_classes))


def class_mean_accuracy(y_true: Any, y_pred: Any, known_classes: Any) -> ClusteringAccuracy:
    """As `clustering_accuracy`, the same match, but each class that occurs has the same weight ("v2b")."""
    return class_mean_of_counts(*_counts_and_known(y_true, y_pred, known_classes))


def two_match_accuracy(y_true: Any, y_pred: Any, known_classes: Any) -> ClusteringAccuracy:
    """Known and unknown samples under a Hungarian match each, all = their mean by share ("v1", older, generous)."""
    return two_match_of_counts(*_counts_and_known(y_true, y_pred, known_classes))


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


# The same from counts (C, P): rows are classes, columns clusters; `known` (C,) says which rows are known classes


def accuracy_of_counts(counts: Any, known: Any) -> ClusteringAccuracy:
    """`clustering_accuracy` of ``counts`` (C, P)."""
    table, known = _checked(counts, known)
    return _shares(hits_of(table), table.sum(1), known)


def class_mean_of_counts(counts: Any, known: Any) -> ClusteringAccuracy:
    """`class_mean_accuracy` of ``counts`` (C, P); classes without samples do not count."""
    table, known = _checked(counts, known)
    total = table.sum(1)
    return _shares(hits_of(table) / np.where(total > 0, total, 1), total > 0, known)


def two_match_of_counts(counts: Any, known: Any) -> ClusteringAccuracy:
    """`two_match_accuracy` of ``counts`` (C, P)."""
    table, known = _checked(counts, known)
    hits = np.zeros(len(table))
    hits[known], hits[~known] = hits_of(table[known]), hits_of(table[~known])
    return _shares(hits, table.sum(1), known)


def match(counts: Any) -> np.ndarray:
    """The class (row) of each cluster (column) under the best one-to-one match, (P,).

    -1 stands for a cluster that is left over, or whose class would share no sample with it.
    """
    from scipy.optimize import linear_sum_assignment

    table = _checked(counts)
    row, column = linear_sum_assignment(table, maximize=True)
    matched = np.full(table.shape[1], -1)
    matched[column] = np.where(table[row, column] > 0, row, -1)
    return matched


def hits_of(table: np.ndarray) -> np.ndarray:
    """Number of samples of each class in the cluster matched to it, (C,)."""
    row = match(table)
    column = np.flatnonzero(row >= 0)
    hits = np.zeros(len(table))
    hits[row[column]] = table[row[column], column]
    return hits


def _shares(hits: np.ndarray, total: np.ndarray, known: np.ndarray) -> ClusteringAccuracy:
    sums = [(hits[rows].sum(), total[rows].sum()) for rows in (np.ones_like(known), known, ~known)]
    return ClusteringAccuracy(*(float(part / whole) if whole else float("nan") for part, whole in sums))


def _counts_and_known(y_true: Any, y_pred: Any, known_classes: Any) -> tuple[np.ndarray, np.ndarray]:
    counts, classes, _ = contingency(y_true, y_pred)
    if isinstance(known_classes, str) or not hasattr(known_classes, "__iter__"):
        raise ValueError(f"known_classes lists the ids of the known classes, such as range(70), not {known_classes!r}")
    ids = plain(known_classes)
    if any(isinstance(value, bool) for value in ids) and not any(isinstance(name, bool) for name in classes):
        raise ValueError("known_classes lists class ids; it was given True/False, which look like a mask of samples")
    if ids and {isinstance(value, str) for value in ids}.isdisjoint(isinstance(name, str) for name in classes):
        raise ValueError(
            f"known_classes and y_true must use the same ids, not {ids[0]!r} and {classes[0]!r}: "
            "name the classes in both, or number them in both"
        )
    return counts, np.array([name in set(ids) for name in classes])


def _checked(counts: Any, known: Any = None) -> Any:
    """`counts` as an array, with the mask of its rows when one is given."""
    table = np.asarray(counts)
    if table.ndim != 2:
        raise ValueError(f"counts must be a matrix, classes x clusters, not of shape {table.shape}")
    if table.size and not (np.isfinite(table).all() and table.min() >= 0):
        raise ValueError(f"counts must be finite and at least 0; the smallest is {table.min()}")
    if known is None:
        return table
    mask = np.asarray(known)
    if mask.dtype != bool or mask.shape != table.shape[:1]:
        raise ValueError(
            f"known must be a boolean for each of the {len(table)} rows of counts, not {mask.dtype} of shape "
            f"{mask.shape}"
        )
    if not table.sum():
        raise ValueError("counts are all 0: there is nothing to score")
    return table, mask


# Ids of any kind: numbers, names, tuples; lists, arrays, tensors


def encode(ids: Any, what: str) -> tuple[np.ndarray, list[Hashable]]:
    """Position (N,) of each id in the list of distinct ids, and that list.

    The list is sorted where its ids can be compared, else in order of appearance. `what` names the ids in errors.
    """
    if (shape := getattr(ids, "shape", None)) is not None and len(shape) != 1:
        raise ValueError(f"{what} must hold one id a sample, shape (N,), not {tuple(shape)}")
    values = plain(ids)
    try:
        distinct = list(dict.fromkeys(values))
    except TypeError as error:
        raise ValueError(f"{what} must hold one hashable id a sample (a number, a name): {error}") from None
    if any(value != value for value in distinct):
        raise ValueError(f"{what} holds NaN, which is no id: leave these samples out or give them one")
    with contextlib.suppress(TypeError):  # ids of several kinds have no order
        distinct = sorted(distinct)
    position = {value: i for i, value in enumerate(distinct)}
    return np.fromiter((position[value] for value in values), np.int64, len(values)), distinct


def plain(ids: Any) -> list[Any]:
    """A list of Python values; a one-element tensor or array inside a list becomes its number."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids  # an array or a tensor
    return [value.item() if hasattr(value, "item") else value for value in values]

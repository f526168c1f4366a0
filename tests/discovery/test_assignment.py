"""The matched accuracy against every permutation, ids of all kinds, and the errors."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from patchgen.discovery.assignment import accuracy_of_counts, clustering_accuracy, contingency, match


def every_match(counts: np.ndarray) -> list[dict[int, int]]:
    """All ways to give clusters (columns) different classes (rows), as many as the smaller side allows."""
    classes, clusters = counts.shape
    if classes >= clusters:
        return [dict(enumerate(rows)) for rows in itertools.permutations(range(classes), clusters)]
    return [
        dict(zip(columns, range(classes), strict=True)) for columns in itertools.permutations(range(clusters), classes)
    ]


def hits_of(counts: np.ndarray, pairs: dict[int, int]) -> np.ndarray:
    hits = np.zeros(len(counts), dtype=int)
    for column, row in pairs.items():
        hits[row] = counts[row, column]
    return hits


def ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else math.nan


def same(one: Any, other: Any) -> bool:
    return all(a == pytest.approx(b, nan_ok=True) for a, b in zip(one, other, strict=True))


def brute_force(counts: np.ndarray, known: np.ndarray) -> list[tuple[float, ...]]:
    """(all, known, unknown) of every optimal match: there may be several, with different parts."""
    matches = [hits_of(counts, pairs) for pairs in every_match(counts)]
    best = max(hits.sum() for hits in matches)
    groups = (np.ones_like(known), known, ~known)
    return [
        tuple(ratio(hits[rows].sum(), counts.sum(1)[rows].sum()) for rows in groups)
        for hits in matches
        if hits.sum() == best
    ]


tables = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
    lambda shape: st.tuples(arrays(np.int64, shape, elements=st.integers(0, 6)), arrays(np.bool_, shape[0]))
)


@settings(max_examples=150, deadline=None)
@given(tables)
def test_the_accuracy_equals_brute_force(table: tuple[np.ndarray, np.ndarray]) -> None:
    counts, known = table
    if not counts.sum():
        counts[0, 0] = 1
    possible, accuracy = brute_force(counts, known), accuracy_of_counts(counts, known)
    assert accuracy.all == possible[0][0]  # equal, not nearly
    assert any(same(accuracy, scores) for scores in possible)


def test_match_names_clusters() -> None:
    #                  7  3  5  9
    counts = np.array([[2, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0]])
    assert match(counts).tolist() == [0, 2, -1, -1]  # dog is left with an empty cluster, which is no match
    assert match(counts.T).tolist() == [0, -1, 1]


ids = [3, 3, 8, 8, 8, 1]
KINDS: dict[str, Any] = {
    "list": ids, "tuple": tuple(ids), "array": np.array(ids), "tensor": torch.tensor(ids),
    "list of tensors": list(torch.tensor(ids)), "floats": [float(i) for i in ids],
    "int8": np.array(ids, dtype=np.int8), "objects": np.array(ids, dtype=object),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [[3, 8], {3, 8}, np.array([3, 8]), torch.tensor([3, 8]), (8, 3, 99)])
def test_ids_of_any_kind(kind: str, known: Any) -> None:
    assert same(clustering_accuracy(KINDS[kind], torch.tensor([0, 0, 5, 5, 0, 0]), known), (4 / 6, 4 / 5, 0.0))


def test_tuples_and_mixed_ids_stay_apart() -> None:
    assert clustering_accuracy([("a", 1), ("a", 2)], [0, 1], [("a", 1)]) == (1.0, 1.0, 1.0)
    assert contingency([1, "1", 1], [0, 0, 0]).counts.tolist() == [[2], [1]]


@pytest.mark.parametrize(("known", "empty"), [([], "known"), ([0, 1], "unknown"), ([5], "known")])
def test_nan_where_there_is_no_sample(known: list[int], empty: str) -> None:
    found = clustering_accuracy([0, 1, 1], [1, 0, 0], known)
    assert found.all == 1 and math.isnan(getattr(found, empty))


@pytest.mark.parametrize(("arguments", "text"), [
    (([0, 1], [0], [0]), "one length, not 2 and 1"),
    (([], [], [0]), "empty"),
    ((np.zeros((2, 2)), [0, 1], [0]), r"one id a sample, shape \(N,\), not \(2, 2\)"),
    (([[0], [1]], [0, 1], [0]), "hashable"),
    (([0.0, math.nan], [0, 1], [0]), "y_true holds NaN"),
    (([0, 1], np.array([0, math.nan]), [0]), "y_pred holds NaN"),
    (([0, 1], [0, 1], 70), r"range\(70\), not 70"),
    ((["a"], ["a"], "a"), "not 'a'"),
    (([0, 1], [0, 1], [True, False]), "mask of samples"),
    (([0, 1], [0, 1], ["0"]), "not '0' and 0"),
])  # fmt: skip
def test_wrong_ids(arguments: tuple[Any, Any, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        clustering_accuracy(*arguments)

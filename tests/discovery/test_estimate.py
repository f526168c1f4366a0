"""The number of classes: right on separated blobs, the search against looking everywhere, and the errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.discovery import Estimate, estimate_num_classes
from patchgen.discovery.kmeans import search


def blobs(classes: int, each: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(classes).repeat_interleave(each)
    return 6 * torch.eye(classes)[label] + 0.3 * torch.randn(len(label), classes, generator=generator), label


@pytest.mark.parametrize(("classes", "known", "each"), [(9, 6, 60), (20, 10, 30)])
def test_finds_the_number_of_separated_blobs(classes: int, known: int, each: int) -> None:
    x, label = blobs(classes, each)
    has_label = (label < known) & (torch.arange(len(x)) % 2 == 0)
    names = [f"class {int(i)}" for i in label[has_label]]
    found = estimate_num_classes(x[~has_label], x[has_label], names, at_most=5 * classes)
    k, curve = found  # a pair, too
    assert isinstance(found, Estimate) and k == classes == found.num_classes
    assert curve[k] == 1 and all(score < 1 for tried, score in curve.items() if tried > k)
    assert list(curve) == sorted(curve) and known <= min(curve) and max(curve) <= 5 * classes


@pytest.mark.parametrize(("low", "high"), [(1, 1), (3, 5), (5, 40), (70, 1000)])
def test_search_finds_every_single_top(low: int, high: int) -> None:
    for top in {low, high, (low + high) // 2, low + (high - low) // 7, high - (high - low) // 9}:
        found = search(lambda k, top=top: -abs(k - top), low, high)  # type: ignore[misc]
        assert found.num_classes == top and len(found.curve) <= 40
        # perfect below the top, as a score is that does not see merged unlabelled classes
        assert search(lambda k, top=top: 1 - max(0, k - top), low, high).num_classes == top  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"at_most": 2}, "3 to 10, not 2"),
        ({"at_most": 11}, "3 to 10, not 11"),
        ({"labels": [0, 1]}, "one length"),
        ({"labelled": torch.zeros(4, 3)}, "labelled has 3 features a point, the others 2"),
        ({"unlabelled": torch.full((6, 2), torch.inf)}, "unlabelled must be finite"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], text: str) -> None:
    good = {"unlabelled": torch.rand(6, 2), "labelled": torch.rand(4, 2), "labels": [0, 1, 2, 2], "at_most": 5}
    with pytest.raises(ValueError, match=text):
        estimate_num_classes(**{**good, **change})


def test_of_equal_scores_that_are_not_perfect_the_smallest_number_wins() -> None:
    assert search(lambda k: 0.5, 3, 9).num_classes == 3 and search(lambda k: 1.0, 3, 9).num_classes == 9

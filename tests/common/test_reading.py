"""Reading ahead in parts."""

import itertools
import threading

import numpy as np
import pytest

from patchgen.common.reading import batches


@pytest.mark.parametrize("items", [np.arange(7), range(7), iter(range(7))])
def test_parts_and_values_in_order(items: object) -> None:
    ticks: list[int] = []
    pairs = [(list(part), value) for part, value in batches(items, lambda part: sum(part), 3, ticks.append)]  # type: ignore[arg-type]
    assert pairs == [([0, 1, 2], 3), ([3, 4, 5], 12), ([6], 6)] and ticks == [3, 3, 1]


def test_each_item_is_read_on_its_own() -> None:
    assert list(batches("abc", str.upper, 2, each=True)) == [(["a", "b"], ["A", "B"]), (["c"], ["C"])]
    assert list(batches([], str.upper)) == []


def test_the_next_part_is_read_while_the_caller_works() -> None:
    second = threading.Event()
    stream = batches(itertools.count(), lambda part: second.set() if part[0] == 2 else None, 2)
    next(stream)
    assert second.wait(10)
    stream.close()  # type: ignore[attr-defined]


def test_an_empty_part_is_impossible() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        next(batches([1], str, 0))


def test_errors_of_reading_reach_the_caller() -> None:
    stream = batches([1, 0], lambda item: 1 // item, 1, each=True)
    assert next(stream) == ([1], [1])
    with pytest.raises(ZeroDivisionError):
        next(stream)

"""Class and cluster ids of any kind (numbers, names, tuples; lists, arrays, tensors) as positions in a list."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import numpy as np


def encode(ids: Any, what: str) -> tuple[np.ndarray, list[Hashable]]:
    """Position (N,) of each id in the list of distinct ids, and that list.

    The list is sorted where its ids can be compared, else in order of appearance. `what` names the ids in errors.
    """
    array = _as_array(ids)
    if array is None:
        return _encode_objects(plain(ids), what)
    if array.ndim != 1:
        raise ValueError(f"{what} must hold one id a sample, shape (N,), not {array.shape}")
    distinct, codes = np.unique(array, return_inverse=True)
    _refuse_missing(distinct.tolist(), what)
    return codes.astype(np.int64), distinct.tolist()


def plain(ids: Any) -> list[Any]:
    """A list of Python values; a one-element tensor or array inside a list becomes its number."""
    array = _as_array(ids)
    if array is not None:
        return array.tolist()
    return [value.item() if hasattr(value, "item") else value for value in ids]


def _as_array(ids: Any) -> np.ndarray | None:
    """Arrays that numpy can sort at once; None for lists, where numpy would turn 1 and "1" into the same id."""
    if hasattr(ids, "detach"):  # a tensor, without importing torch
        return ids.detach().cpu().numpy()
    array = np.asarray(ids) if hasattr(ids, "__array__") else None
    return None if array is None or array.dtype == object else array


def _encode_objects(values: list[Any], what: str) -> tuple[np.ndarray, list[Hashable]]:
    try:
        distinct = list(dict.fromkeys(values))
    except TypeError as error:
        raise ValueError(f"{what} must hold one hashable id a sample (a number, a name): {error}") from None
    _refuse_missing(distinct, what)
    with contextlib.suppress(TypeError):  # ids of several kinds have no order
        distinct = sorted(distinct)
    position = {value: i for i, value in enumerate(distinct)}
    return np.fromiter((position[value] for value in values), np.int64, len(values)), distinct


def _refuse_missing(distinct: list[Any], what: str) -> None:
    if any(value != value for value in distinct):
        raise ValueError(f"{what} holds NaN, which is no id: leave these samples out or give them one")

"""What the runs of one process share: weights that were read, a table, an open store. The last of each kind is kept.

    with keeping():
        table = kept("table", key, lambda: read_table(data))        # made once, as long as the key is the same

Outside of `keeping` nothing is kept, and a value is made each time it is asked for. The key must hold all that decides
the value: a run computes the same numbers whatever was run before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_values: dict[str, tuple[Hashable, Any]] | None = None


@contextmanager
def keeping() -> Iterator[None]:
    """Keep values while it lasts; within another one they are kept until that one ends."""
    global _values
    if _values is not None:
        yield
        return
    _values = {}
    try:
        yield
    finally:
        _values = None


def is_keeping() -> bool:
    return _values is not None


def kept(kind: str, key: Hashable, make: Callable[[], T], is_current: Callable[[T], bool] = lambda value: True) -> T:
    """The kept value of this kind, where it has this key and `is_current` says so; else a new one, which is kept."""
    if _values is None:
        return make()
    known = _values.pop(kind, None)  # the old value is gone before a new one is made
    value: T = known[1] if known is not None and known[0] == key and is_current(known[1]) else make()
    _values[kind] = key, value
    return value

"""Cache for objects shared by the runs of one process: loaded weights, a table, an open store; the last of each kind.

    with process_cache():
        table = cached("table", key, lambda: read_table(data))        # computed once, while the key is the same

Outside of `process_cache` nothing is cached. The key must include everything that the value depends on, so that the
results of a run do not depend on earlier runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_values: dict[str, tuple[Hashable, Any]] | None = None


@contextmanager
def process_cache() -> Iterator[None]:
    """Cache values inside this context; nested contexts keep them until the outermost one ends."""
    global _values
    if _values is not None:
        yield
        return
    _values = {}
    try:
        yield
    finally:
        _values = None


def is_caching() -> bool:
    return _values is not None


def cached(kind: str, key: Hashable, make: Callable[[], T], is_current: Callable[[T], bool] = lambda value: True) -> T:
    """The cached value of this kind, if it has this key and `is_current` is true; otherwise a new one."""
    if _values is None:
        return make()
    known = _values.pop(kind, None)  # frees the old value before a new one is made
    value: T = known[1] if known is not None and known[0] == key and is_current(known[1]) else make()
    _values[kind] = key, value
    return value

"""Reading data, the next batch ahead in threads.

for part, pixels in batches(rows, store.load, 64, tick):              # rows of a table, read a batch at a time
for part, images in batches(paths, decode_one, 64, tick, each=True):  # files, each decoded on its own
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

BATCH = 64
DECODERS = 2  # threads that read the next batch


def batches(
    items: Iterable[Any],
    read: Callable[[Any], Any],
    size: int = BATCH,
    tick: Callable[[int], None] | None = None,
    *,
    each: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """(part, what `read` makes of it, or of `each` of its items) for consecutive parts; at most two are in memory."""
    if size < 1:
        raise ValueError(f"batch must be at least 1, not {size}")
    parts = _parts(items, size)
    with ThreadPoolExecutor(DECODERS) as pool:

        def begin() -> tuple[Any, list[Any]] | None:
            part = next(parts, None)
            return None if part is None else (part, [pool.submit(read, item) for item in (part if each else [part])])

        ahead = begin()
        while ahead:
            (part, reading), ahead = ahead, begin()
            values = [future.result() for future in reading]
            yield part, values if each else values[0]
            if tick:
                tick(len(part))


def _parts(items: Iterable[Any], size: int) -> Iterator[Any]:
    if isinstance(items, np.ndarray):
        return (items[start : start + size] for start in range(0, len(items), size))
    source = iter(items)
    return iter(lambda: list(islice(source, size)), [])

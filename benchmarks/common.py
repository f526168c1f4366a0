"""What the benchmarks share: clocks, checks, and the lines of their table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from patchgen.diagnose.cost import device, now

# measured and value, and where there is a target: the target and whether it is reached
Line = tuple[str, str] | tuple[str, str, str, bool]


def report(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def cpu_seconds(work: Callable[..., object], *arguments: object) -> float:
    """Processor seconds of all threads: what other programs take from a core is not counted."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def step_seconds(work: Callable[..., object], *arguments: object) -> float:
    """Processor seconds divided by the number of threads; on an accelerator those of the clock."""
    if device().type == "cpu":
        return cpu_seconds(work, *arguments) / torch.get_num_threads()
    return clock_seconds(work, *arguments)


def clock_seconds(work: Callable[..., object], *arguments: object) -> float:
    start = now()
    work(*arguments)
    return now() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

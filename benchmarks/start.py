"""Seconds that a command needs to answer: `import patchgen` and `patchgen --help`, each in a fresh process.

result = measure()
result["seconds"]["patchgen --help"]          # on the clock; beside it what Python alone takes
result["processor"]["patchgen --help"]        # without what other programs took meanwhile
"""

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Line, at_least_one, report
from patchgen.common.child_process import child_environment, python

WORDS: dict[str, Sequence[str]] = {
    "python": ("-c", "pass"),
    "import patchgen": ("-c", "import patchgen"),
    "patchgen --help": ("-m", "patchgen", "--help"),
}
SMALL = {"repeats": 1}
TARGETS = {"import patchgen": 0.3, "patchgen --help": 0.5}


def measure(*, repeats: int = 5) -> dict[str, Any]:
    """Medians of each, taken in turn. The targets are for the clock."""
    at_least_one(repeats=repeats)
    clock: dict[str, list[float]] = {name: [] for name in WORDS}
    processor: dict[str, list[float]] = {name: [] for name in WORDS}
    for _ in range(repeats):
        for name, words in WORDS.items():
            start, used = time.perf_counter(), _of_children()
            subprocess.run(python(*words), check=True, capture_output=True, env=child_environment())
            processor[name].append(_of_children() - used)
            clock[name].append(time.perf_counter() - start)
        report("  ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in clock.items()))
    seconds = {name: statistics.median(each) for name, each in clock.items()}
    return {
        "repeats": repeats, "seconds": seconds,
        "processor": {name: statistics.median(each) for name, each in processor.items()},
        "reached": {name: seconds[name] < target for name, target in TARGETS.items()},
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    return [
        (f"`{name}`", f"{result['seconds'][name]:.2f} s", f"< {target} s", result["reached"][name])
        for name, target in TARGETS.items()
    ]


def _of_children() -> float:
    """Processor seconds of all processes that were started from here and have ended."""
    times = os.times()
    return times.children_user + times.children_system

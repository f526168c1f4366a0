"""Seconds that a command needs to answer: `import patchgen` and `patchgen --help`, each in a fresh process.

found = measure_start()
found["seconds"]["patchgen --help"]          # on the clock; beside it what Python alone takes
found["processor"]["patchgen --help"]        # without what other programs took meanwhile
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from patchgen.common.children import child_environment, python
from patchgen.diagnose.cost_input import Report

WORDS: dict[str, Sequence[str]] = {
    "python": ("-c", "pass"),
    "import patchgen": ("-c", "import patchgen"),
    "patchgen --help": ("-m", "patchgen", "--help"),
}
TARGETS = {"import patchgen": 0.3, "patchgen --help": 0.5}


def measure_start(*, repeats: int = 5, report: Report = lambda _: None) -> dict[str, Any]:
    """Medians of each, taken in turn; `report` gets one line per round. The targets are for the clock."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    clock: dict[str, list[float]] = {name: [] for name in WORDS}
    processor: dict[str, list[float]] = {name: [] for name in WORDS}
    for _ in range(repeats):
        for name, words in WORDS.items():
            start, used = time.perf_counter(), _of_children()
            subprocess.run(python(*words), check=True, capture_output=True, env=child_environment())
            clock[name].append(time.perf_counter() - start)
            processor[name].append(_of_children() - used)
        report("  ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in clock.items()))
    seconds = {name: statistics.median(each) for name, each in clock.items()}
    return {
        "repeats": repeats, "seconds": seconds, "target": TARGETS,
        "processor": {name: statistics.median(each) for name, each in processor.items()},
        "reached": {name: seconds[name] < target for name, target in TARGETS.items()},
    }  # fmt: skip


def _of_children() -> float:
    """Processor seconds of all processes that were started from here and have ended."""
    times = os.times()
    return times.children_user + times.children_system

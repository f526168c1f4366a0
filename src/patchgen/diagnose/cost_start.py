"""Seconds that a command needs to answer: `import patchgen` and `patchgen --help`, each in a fresh process.

measure_start()["seconds"]["patchgen --help"]          # and beside it what Python alone takes

They are the new process's processor seconds, which on an idle machine are those of the clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from patchgen.diagnose.cost_input import Report

WORDS: dict[str, Sequence[str]] = {
    "python": ("-c", "pass"),
    "import patchgen": ("-c", "import patchgen"),
    "patchgen --help": ("-m", "patchgen", "--help"),
}
TARGETS = {"import patchgen": 0.3, "patchgen --help": 0.5}


def measure_start(*, repeats: int = 5, report: Report = lambda _: None) -> dict[str, Any]:
    """Median seconds of each, taken in turn; `report` gets one line per round."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    taken: dict[str, list[float]] = {name: [] for name in WORDS}
    for _ in range(repeats):
        for name, words in WORDS.items():
            start = _of_children()
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
            taken[name].append(_of_children() - start)
        report("  ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in taken.items()))
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    reached = {name: seconds[name] < target for name, target in TARGETS.items()}
    return {"repeats": repeats, "seconds": seconds, "target": TARGETS, "reached": reached}


def _of_children() -> float:
    """Processor seconds of all processes that were started from here and have ended."""
    times = os.times()
    return times.children_user + times.children_system

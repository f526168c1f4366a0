"""All benchmarks by name, and one table: what was measured, what was wanted, reached or missed.

    found = measure_all()
    for row in table(found): print(row.subject, row.what, row.value, row.target, row.verdict)

Each benchmark is a module with `measure`, whose arguments are its options, `lines` of what it found, and `SMALL`, the
arguments that only try it. Values are ratios and exponents within one run, which mean the same on every machine; only
the start and compiling are in seconds, and what the modes gain is this machine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks import (
    bookkeeping,
    discovery,
    fit,
    flat,
    fold,
    grouping,
    growth,
    kmeans,
    memory,
    methods,
    modes,
    pipeline,
    predict,
    probe,
    rate,
    start,
    sweep,
)
from benchmarks.common import report

TABLE: dict[str, ModuleType] = {  # of docs/benchmarks.md
    "rate": rate,
    "modes": modes,
    "memory": memory,
    "input": pipeline,
    "fold": fold,
    "fit": fit,
    "predict": predict,
    "flat": flat,
    "probe": probe,
    "grouping": grouping,
    "growth": growth,
    "bookkeeping": bookkeeping,
    "start": start,
}
SUBJECTS = TABLE | {"methods": methods, "kmeans": kmeans, "discovery": discovery, "sweep": sweep}


class Row(NamedTuple):
    """A line of the table; `reached` is None where there is no target."""

    subject: str
    what: str
    value: str
    target: str = ""
    reached: bool | None = None

    @property
    def verdict(self) -> str:
        return "" if self.reached is None else "reached" if self.reached else "missed"


def measure_all(subjects: Sequence[str] = tuple(TABLE), small: bool = False) -> dict[str, dict[str, Any]]:
    """What each benchmark finds with its default arguments, or the small ones, by name."""
    found = {}
    for name in subjects:
        report(f"-- {name}")
        found[name] = SUBJECTS[name].measure(**SUBJECTS[name].SMALL if small else {})
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows of all subjects that were measured."""
    return [Row(name, *line) for name, each in found.items() for line in SUBJECTS[name].lines(each)]


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for the docs."""
    lines = ["| subject | measured | value | target | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join((*row[:4], row.verdict))} |" for row in rows)]) + "\n"

"""All benchmarks by name, and one table: what was measured, what was wanted, reached or missed.

Each benchmark is a module with `measure`, whose arguments are its options, `lines` of its result, and `SMALL`, the
arguments that only try it. Values are ratios and exponents within one run, which mean the same on every machine; only
the start and compiling are in seconds, and what the modes gain is this machine's.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

TABLE = (  # of docs/develop/benchmarks.md
    "rate", "modes", "memory", "input", "fold", "fit", "predict", "flat", "probe", "peers", "bookkeeping", "start"
)  # fmt: skip
SUBJECTS = {name: import_module(f"benchmarks.{name}") for name in (*TABLE, "methods", "sweep")}


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


def table(result: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows of all subjects that were measured."""
    return [Row(name, *line) for name, each in result.items() for line in SUBJECTS[name].lines(each)]


HEAD = ("| subject | measured | value | target | |", "|---|---|---|---|---|")


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for the docs."""
    return "\n".join([*HEAD, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    return f"| {' | '.join((*row[:4], row.verdict))} |"


def put_into(page: str, rows: Sequence[Row]) -> str:
    """A page with its table of benchmarks renewed: the rows of measured subjects are replaced, the others stay.

    Raises:
        ValueError: the page has no such table.
    """
    lines = page.split("\n")
    if HEAD[0] not in lines:
        raise ValueError(f"the page has no table of benchmarks, which begins with: {HEAD[0]}")
    start = lines.index(HEAD[0]) + len(HEAD)
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    of_subject: dict[str, list[str]] = {}
    for line in lines[start:end]:
        of_subject.setdefault(line.split("|")[1].strip(), []).append(line)
    of_subject |= {row.subject: [] for row in rows}
    for row in rows:
        of_subject[row.subject].append(_line(row))
    order = sorted(of_subject, key=lambda name: [*TABLE, name].index(name))
    return "\n".join([*lines[:start], *(line for name in order for line in of_subject[name]), *lines[end:]])

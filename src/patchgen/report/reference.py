"""The paper's ten result tables, number by number, for comparison with our results: nothing here was run by us.

One line of `reference/<name>.csv` is one printed number; `reference/tables.yaml` says what to be careful about.

    find("mdg", method="PatchGen", backbone="ViT-L/14", dataset="average")    # 79.2, and 80.9 with SWAD
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import read_yaml

FOLDER = Path(__file__).with_name("reference")


@dataclass(frozen=True)
class PaperTable:
    title: str
    number: int  # in the paper's appendix
    note: str  # caveats


@dataclass(frozen=True)
class Row:
    """One printed number, in per cent, with what it was measured on. An empty string: not stated in the paper."""

    row: int  # line of the printed table, from 1
    method: str
    backbone: str
    pretraining: str
    tuning: str  # head | layernorm | full
    swad: bool  # the row or the column's heading says SWAD
    setting: str  # the ablation's task; seed and loss weights of the sensitivity table
    dataset: str  # "average": over the data sets
    domain: str  # the unseen domain, or the CCD session; "average": over them
    metric: str  # accuracy | all | known | unknown | gain
    value: float
    error: float | None  # printed after ±
    rerun: bool  # starred: run again by the paper's authors
    source: str  # the paper's citation key and venue, if it cites someone; then its table and label


TABLES = {name: PaperTable(**facts) for name, facts in read_yaml(FOLDER / "tables.yaml").items()}


def read_reference(name: str) -> list[Row]:
    """All numbers of one table, in printed order: line by line, left to right."""
    if name not in TABLES:
        raise ValueError(f"unknown reference table {name!r}{did_you_mean(name, TABLES)} (known: {', '.join(TABLES)})")
    convert: dict[str, Callable[[str], Any]] = {
        "row": int, "value": float, "error": lambda text: float(text) if text else None,
        "swad": "yes".__eq__, "rerun": "yes".__eq__,
    }  # fmt: skip
    with open(FOLDER / f"{name}.csv", newline="", encoding="utf-8") as stream:
        return [Row(**{key: convert.get(key, str)(text) for key, text in line.items()})
                for line in csv.DictReader(stream)]  # fmt: skip


def find(name: str, **filters: str | int | bool | float) -> list[Row]:
    """The numbers of a table whose columns have the given values; empty if the paper has none for the combination."""
    rows = read_reference(name)
    for column, wanted in filters.items():
        known = {getattr(row, column): str(getattr(row, column)) for row in rows}
        if wanted not in known:
            near = did_you_mean(str(wanted), known.values())
            raise ValueError(f"no {column} in {name!r} is {wanted!r}{near} (known: {', '.join(known.values())})")
    return [row for row in rows if all(getattr(row, column) == wanted for column, wanted in filters.items())]

"""The paper's ten result tables, number by number, for comparison with our results: nothing here was run by us.

One line of `reference/<name>.csv` is one printed number; `reference/tables.yaml` says what to be careful about.

    find("mdg", method="PatchGen", backbone="ViT-L/14", dataset="average")    # 79.2, and 80.9 with SWAD
"""

import csv
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from patchgen.common.text import did_you_mean, name_key
from patchgen.common.untrusted import read_yaml
from patchgen.report.table import Column, Entry, Line
from patchgen.runs.scores import paper_backbone

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
NAMES = {  # our label -> the paper's words
    "lp": ("LP",),
    "lp-ln": ("LP+LN", "Baseline"),
    "full": ("LP+full",),
    "patchgen": ("PatchGen",),
    "patchgen@full": ("PatchGen",),
    "patchgen+lreg": ("PatchGen",),  # of unknown classes, where the paper's host is L-Reg
    "miro": ("MIRO", "Baseline+MIRO"),
    "gmdg": ("GMDG", "Baseline+GMDG"),
    "lreg": ("L-Reg",),
    "full+gestur": ("GESTUR",),
    "full+miro": ("MIRO",),
    "full+gmdg": ("GMDG",),
    "full+lreg": ("L-Reg",),
}


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
        _check(f"column of {name!r}", column, [field.name for field in fields(Row)])
        _check(f"{column} in {name!r}", wanted, list(dict.fromkeys(getattr(row, column) for row in rows)))
    return [row for row in rows if all(getattr(row, column) == wanted for column, wanted in filters.items())]


def _check(what: str, word: object, known: Sequence[object]) -> None:
    if word not in known:
        names = list(map(str, known))
        listed = textwrap.shorten(", ".join(filter(None, names)), 300, placeholder=" ...")
        raise ValueError(f"no {what} is {word!r}{did_you_mean(str(word), names)} (known: {listed})")


def paper_lines(reference: str, label: str, backbone: str, columns: Sequence[Column], swad: bool) -> list[Line]:
    """The lines of a reference table that show this method, with or without SWAD; those with our backbone, if any."""
    names = NAMES.get(label)
    rows = [row for row in read_reference(reference) if row.swad == swad
            and (row.method in names if names else name_key(row.method) == name_key(label.removesuffix("@full")))
            and (label != "patchgen@full" or row.tuning == "full")]  # fmt: skip
    same = [row for row in rows if (row.backbone, row.pretraining) == paper_backbone(backbone)]
    printed: dict[tuple[str, ...], list[Row]] = defaultdict(list)  # sessions of a stream are several lines there
    for row in same or rows:
        printed[row.method, row.backbone, row.pretraining, row.tuning].append(row)
    lines = []
    for (method, architecture, pretraining, _), group in printed.items():
        entries = tuple(Entry(paper=find_paper(group, column)) for column in columns)
        if any(entry.paper for entry in entries):
            weights = " ".join(filter(None, (pretraining, architecture)))
            text = f"{method}{' + SWAD' * (swad and method != 'SWAD')}, {weights}"
            lines.append(Line(text, entries, paper=True, rerun=group[0].rerun))
    return lines


def find_paper(rows: Sequence[Row], column: Column) -> Row | None:
    """The paper's number for a column, among the rows of one method and backbone."""
    place = tuple(map(name_key, column.key))
    wanted = (row for row in rows if row.metric == column.metric and row.swad == (column.checkpoint == "swad"))
    return next((row for row in wanted if (name_key(row.dataset), name_key(row.domain)) == place), None)

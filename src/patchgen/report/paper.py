"""The paper's lines to show next to ours: the same method and averaging; the backbone is named.

If the paper has our backbone, only those lines are shown; otherwise all of its backbones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from patchgen.data.benchmarks import name_key
from patchgen.report.reference import Row, read_reference
from patchgen.report.table import Column, Entry, Line
from patchgen.runs.scores import paper_backbone

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


def paper_lines(reference: str, label: str, backbone: str, columns: Sequence[Column], swad: bool) -> list[Line]:
    """The lines of a reference table that show this method, with or without SWAD."""
    rows = [row for row in read_reference(reference) if row.swad == swad and _is(row, label)]
    ours = paper_backbone(backbone)
    same = [row for row in rows if (row.backbone, row.pretraining) == ours]
    printed: dict[tuple[str, ...], list[Row]] = {}  # the sessions of a stream are several lines of the paper's table
    for row in same or rows:
        printed.setdefault((row.method, row.backbone, row.pretraining, row.tuning), []).append(row)
    lines = (_line(found, columns, swad) for found in printed.values())
    return [line for line in lines if any(entry.paper for entry in line.entries)]


def find_paper(rows: Sequence[Row], column: Column) -> Row | None:
    """The paper's number for a column, among the rows of one method and backbone."""
    dataset, domain = (name_key(word) for word in column.key)
    wanted = (row for row in rows if row.metric == column.metric and row.swad == (column.checkpoint == "swad"))
    return next((row for row in wanted if (name_key(row.dataset), name_key(row.domain)) == (dataset, domain)), None)


def _is(row: Row, label: str) -> bool:
    names = NAMES.get(label)
    if names is None:
        return name_key(row.method) == name_key(re.sub(r"@full$", "", label))
    return row.method in names and (label != "patchgen@full" or row.tuning == "full")


def _line(rows: Sequence[Row], columns: Sequence[Column], swad: bool) -> Line:
    first = rows[0]
    weights = " ".join(filter(None, (first.pretraining, first.backbone)))
    label = f"{first.method}{' + SWAD' * (swad and first.method != 'SWAD')}, {weights}"
    entries = tuple(Entry(paper=find_paper(rows, column)) for column in columns)
    return Line(label, entries, paper=True, rerun=first.rerun)

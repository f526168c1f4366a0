"""A grid as Markdown, as CSV and for the terminal. The paper's numbers are set apart in all of them.

HTML is in `pages/templates/report.html`, LaTeX in `report/latex.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from patchgen.common.text import markdown
from patchgen.report.grid import Column, Entry, Grid, Line

CSV_HEADER = (
    "table", "line", "group", "column", "checkpoint", "metric", "value", "standard_error", "seeds", "images", "split",
    "selected_by", "settings_tried", "runs", "paper_value", "paper_error", "paper_rerun", "paper_source", "command",
)  # fmt: skip


BEST = "leads its column by more than the 95 % interval of the difference, paired over seeds"


def number_text(entry: Entry, seeds: int) -> str:
    """`84.1 ± 0.3`, with the number of seeds if a cell has fewer than the others."""
    number = entry.number
    if number is None:
        return ""
    error = "" if number.error is None else f" ± {number.error:.1f}"
    few = f" ({len(number.by_seed)} of {seeds} seeds)" if len(number.by_seed) < seeds else ""
    return f"{number.mean:.1f}{error}{few}"


def paper_text(entry: Entry) -> str:
    if entry.paper is None:
        return ""
    return f"{entry.paper.value:.1f}" + ("" if entry.paper.error is None else f" ± {entry.paper.error:.1f}")


def label_text(line: Line) -> str:
    return f"paper: {line.label}{'*' * line.rerun}" if line.paper else line.label


def heading(column: Column) -> str:
    """Group and heading in one line."""
    return " ".join(filter(None, (column.group, column.heading)))


def footnotes(grid: Grid) -> dict[str, int]:
    """The commands that fill missing cells, numbered from 1."""
    return {command: number for number, command in enumerate(grid.commands(), 1)}


# Markdown


def to_markdown(grid: Grid) -> str:
    """The title, the table, its notes, and the commands for missing cells."""
    marks = footnotes(grid)
    rows = [_markdown_row(grid, line, marks) for line in grid.lines]
    head = [grid.first, *(heading(column) for column in grid.columns)]
    text = [f"## {_inert(grid.title)}", "", f"*{_inert(grid.setup)}*", ""]
    text += [markdown([_inert(word).replace("|", "\\|") for word in head], rows)]
    text += ["", *(f"- {_inert(note.replace('Grey', 'Italics'))}" for note in grid.notes)]
    text += [f"- Missing [{number}]: `{command}`" for command, number in marks.items()]
    return "\n".join(text) + "\n"


def _inert(text: str) -> str:
    """Text with HTML escaped for Markdown: class names are arbitrary."""
    return escape(text, quote=False)


def _plain(text: str, paper: bool) -> str:
    safe = _inert(text).replace("|", "\\|").replace("*", "\\*")
    return f"*{safe}*" if paper else safe


def _markdown_row(grid: Grid, line: Line, marks: dict[str, int]) -> list[str]:
    return [_plain(label_text(line), line.paper), *(_markdown_cell(grid, entry, marks) for entry in line.entries)]


def _markdown_cell(grid: Grid, entry: Entry, marks: dict[str, int]) -> str:
    ours = f"[{marks[entry.command]}]" if entry.missing else number_text(entry, grid.seeds)
    paper = paper_text(entry)
    ours = f"**{ours}**" if grid.is_best(entry) else ours
    return " ".join(filter(None, (ours, f"*{paper}*" if paper else "")))


# HTML


def column_groups(grid: Grid) -> list[tuple[str, int]]:
    """(heading above the columns, how many columns it spans)."""
    return [(name, len(list(columns))) for name, columns in groupby(grid.columns, key=lambda column: column.group)]


# The terminal


def to_terminal(grid: Grid) -> tuple[list[str], list[list[str]], list[str]]:
    """Heading, rows and the style of each row; `[-]` is a cell that has no run."""

    def cell(entry: Entry) -> str:
        ours = "[-]" if entry.missing else number_text(entry, grid.seeds) + " (best)" * grid.is_best(entry)
        return " ".join(filter(None, (ours, f"(paper {paper_text(entry)})" if entry.paper else "")))

    rows = [
        [label_text(line), *(paper_text(e) if line.paper else cell(e) for e in line.entries)] for line in grid.lines
    ]
    head = [grid.first, *(heading(column) for column in grid.columns)]
    return head, rows, ["dim" if line.paper else "" for line in grid.lines]


# CSV


def to_rows(grid: Grid) -> Iterable[Sequence[str]]:
    """One row per cell, in the order of `CSV_HEADER`; empty cells of the paper's lines are left out."""
    for line in grid.lines:
        for column, entry in zip(grid.columns, line.entries, strict=True):
            if entry.number or entry.paper or entry.missing:
                checkpoint = "swad" if line.label.endswith("+ SWAD") else column.checkpoint
                place = (grid.name, label_text(line), column.group, column.heading, checkpoint, column.metric)
                yield (*place, *_ours(entry), *_papers(entry), entry.command)


def _ours(entry: Entry) -> tuple[str, ...]:
    number = entry.number
    if number is None:
        return ("",) * 8
    error = "" if number.error is None else f"{number.error:.4f}"
    seeds = " ".join(map(str, number.by_seed))
    rest = (str(number.images), number.split, number.select, str(number.tried), " ".join(number.runs))
    return f"{number.mean:.4f}", error, seeds, *rest


def _papers(entry: Entry) -> tuple[str, ...]:
    row = entry.paper
    if row is None:
        return ("",) * 4
    return f"{row.value:g}", "" if row.error is None else f"{row.error:g}", "yes" if row.rerun else "no", row.source

"""patchgen report RUNS... --out DIR: the paper's tables and figures from run folders, beside the paper's numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from patchgen.commands import announce, parse


def report(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: str = "report",
    part: Literal["in", "all"] = "in",
    quiet: bool = False,
) -> None:
    """Make the paper's tables (Markdown, CSV, LaTeX, one HTML page) and figures (PNG, SVG, CSV) from run folders.

    Args:
        runs: Folders that hold run folders, at any depth.
        out: Folder to write into.
        part: Images of the unseen domain that count: `in`, 80 % as in the paper, or `all`.
        quiet: Print the page's path alone.
    """
    if not runs:
        raise ValueError("RUNS is missing; give the folder that holds the runs, such as runs")
    announce(quiet)
    from patchgen.report.write import write_report

    made = write_report([Path(folder) for folder in runs], Path(out), part)
    if not quiet:
        print(made.in_words(), file=sys.stderr)
    print(made.page)


def main(argv: list[str]) -> int:
    parse(report, "report", argv)
    return 0

"""patchgen report RUNS... --out DIR: the paper's tables and figures from run folders, next to the paper's numbers."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from patchgen.commands import print_table
from patchgen.common.text import printable


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
        quiet: Print only the page's path, without the tables.
    """
    if not runs:
        raise ValueError("RUNS is missing; give the folder that holds the runs, such as runs")
    from patchgen.report.write import BEST, to_terminal, write_report

    made = write_report([Path(folder) for folder in runs], Path(out), part)
    if not quiet:
        with contextlib.redirect_stdout(sys.stderr):  # only the page's path goes to stdout
            for grid in made.grids:
                print(f"\n{printable(grid.title)}\n{printable(grid.setup)}")
                print_table(*to_terminal(grid))
            if any(grid.best for grid in made.grids):
                print(f"(best): {BEST}")
        print(made.summary(), file=sys.stderr)
    print(made.page)


COMMAND = report

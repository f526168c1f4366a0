"""patchgen report RUNS... --out DIR: the paper's tables and figures from run folders, next to the paper's numbers."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from patchgen.commands import announce, print_table
from patchgen.common.text import printable

if TYPE_CHECKING:
    from patchgen.report.table import Grid


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
    announce(quiet)
    from patchgen.report.write import write_report

    made = write_report([Path(folder) for folder in runs], Path(out), part)
    if not quiet:
        with contextlib.redirect_stdout(sys.stderr):  # only the page's path goes to stdout
            _show(made.grids)
        print(made.summary(), file=sys.stderr)
    print(made.page)


def _show(grids: "Sequence[Grid]") -> None:
    """Print every table with its legend."""
    from patchgen.report.render import BEST, to_terminal

    for grid in grids:
        print(f"\n{printable(grid.title)}\n{printable(grid.setup)}")
        print_table(*to_terminal(grid))
    if any(grid.best for grid in grids):
        print(f"(best): {BEST}")


COMMAND = report

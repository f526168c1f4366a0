"""What all figures share: a figure with the table of what it shows, saved as PNG, SVG and CSV.

Colours are Okabe and Ito's, and nothing is told by colour alone: lines differ in dash and marker, points in shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.common.csv_files import write_csv
from patchgen.common.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
MARKERS = "osD^vP*X"
DPI = 200
Row = Sequence[Any]


@dataclass(frozen=True)
class Drawn:
    """A figure on its way to the disk, with the table of what it shows."""

    name: str
    description: str
    figure: Figure
    header: Sequence[str]
    rows: list[Row]

    def save(self, folder: Path) -> None:
        """`name.png`, `name.svg` and `name.csv`."""
        from matplotlib import rc_context

        for ending, options in (("png", {"dpi": DPI}), ("svg", {"metadata": {"Date": None}})):
            salt = rc_context({"svg.hashsalt": self.name})  # the same figure gives the same bytes
            with salt, replacing(folder / f"{self.name}.{ending}") as temporary:
                self.figure.savefig(temporary, format=ending, **options)  # type: ignore[arg-type]
        write_csv(
            folder / f"{self.name}.csv", self.header, [[str(cell) for cell in row] for row in self.rows], people=True
        )


def new_figure(width: float, height: float) -> Figure:
    """White, with room made for what stands in it; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def plain(axes: Axes) -> None:
    """Without the frame's upper and right line."""
    axes.spines[["top", "right"]].set_visible(False)


def percent_axis(axes: Axes, highest: float) -> None:
    """An x axis of per cent from 0 to `highest`: room for numbers beside the bars, but no tick past 100."""
    from matplotlib.ticker import MaxNLocator

    ticks = [tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, min(highest, 100)) if tick <= 100]
    axes.set(xlim=(0, 1.18 * max(highest, 1)), xticks=ticks)


def cap_percent(axes: Axes) -> None:
    """A y axis of per cent whose margin does not reach past 100."""
    axes.set_ylim(top=min(axes.get_ylim()[1], 100.8))

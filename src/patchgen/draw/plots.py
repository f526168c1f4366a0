"""Base of all figures: a figure with the table of its data, saved as PNG, SVG and CSV.

Colours are Okabe and Ito's, and colour is never the only cue: lines also differ in dash and marker, points in shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.common.files import replacing, write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
MARKERS = "osD^vP*X"
DPI = 200
Row = Sequence[Any]


@dataclass(frozen=True)
class Drawn:
    """A figure with the table of its data, to be saved."""

    name: str
    description: str
    figure: Figure
    header: Sequence[str]
    rows: list[Row]

    def save(self, folder: Path) -> None:
        """`name.png`, `name.svg` and `name.csv`."""
        from matplotlib import rc_context

        fix_layout(self.figure)
        for ending, options in (("png", {"dpi": DPI}), ("svg", {"metadata": {"Date": None}})):
            salt = rc_context({"svg.hashsalt": self.name})  # the same figure gives the same bytes
            with salt, replacing(folder / f"{self.name}.{ending}") as temporary:
                self.figure.savefig(temporary, format=ending, **options)  # type: ignore[arg-type]
        write_csv(
            folder / f"{self.name}.csv", self.header, [[str(cell) for cell in row] for row in self.rows], people=True
        )


def new_figure(width: float, height: float) -> Figure:
    """A white figure with constrained layout; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def fix_layout(figure: Figure) -> None:
    """Lay a figure out once, not again for every file that it is written to."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def plain(axes: Axes) -> None:
    """Remove the upper and right lines of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def percent_axis(axes: Axes, highest: float) -> None:
    """An x axis in per cent from 0 to `highest`, with room for numbers next to the bars, but no tick above 100."""
    from matplotlib.ticker import MaxNLocator

    ticks = [tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, min(highest, 100)) if tick <= 100]
    axes.set(xlim=(0, 1.18 * max(highest, 1)), xticks=ticks)


def cap_percent(axes: Axes) -> None:
    """A y axis in per cent without a margin above 100."""
    axes.set_ylim(top=min(axes.get_ylim()[1], 100.8))

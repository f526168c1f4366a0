"""Figures with the table of their data, saved as PNG, SVG and CSV.

Colours are Okabe and Ito's, and colour is never the only cue: lines also differ in dash and marker, points in shape.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.common.files import replacing, write_csv, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
MARKERS = "osD^vP*X"
DPI = 200
Row = Sequence[Any]


@dataclass(frozen=True)
class Drawn:
    name: str
    description: str
    figure: "Figure"
    header: Sequence[str]
    rows: list[Row]

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG document: the same figure gives the same text."""
        from matplotlib import rc_context

        buffer = io.StringIO()
        with rc_context({"svg.hashsalt": self.name + self.description}):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    def save(self, folder: Path) -> None:
        """`name.png`, `name.svg` and `name.csv`."""
        with replacing(folder / f"{self.name}.png") as temporary:
            self.figure.savefig(temporary, format="png", dpi=DPI)
        write_text(folder / f"{self.name}.svg", self.svg)
        rows = [[str(cell) for cell in row] for row in self.rows]
        write_csv(folder / f"{self.name}.csv", self.header, rows, people=True)


def new_figure(width: float, height: float) -> "Figure":
    """A white figure with constrained layout; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def plain(axes: "Axes") -> None:
    """Remove the upper and right lines of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def side_legend(axes: "Axes", **options: Any) -> None:
    """A legend to the right of the axes; names are never read as formulas."""
    legend = axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), **options)
    for text in legend.get_texts():
        text.set_parse_math(False)


def percent_axis(axes: "Axes", highest: float) -> None:
    """An x axis in per cent from 0 to `highest`, with room for numbers next to the bars, but no tick above 100."""
    from matplotlib.ticker import MaxNLocator

    ticks = [tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, min(highest, 100)) if tick <= 100]
    axes.set(xlim=(0, 1.18 * max(highest, 1)), xticks=ticks)

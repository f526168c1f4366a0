"""The figures of a report, each from one table: bars, sessions with gains, rows of the ablation, loss weights.

Ours has error bars (the ± of the table); the paper's numbers are grey, and hatched or dotted.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.draw.plots import MARKERS, PALETTE, Drawn, Row, new_figure, percent_axis, plain, side_legend
from patchgen.report.table import Entry, Grid, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADER = ("line", "column", "value", "standard_error", "whose")
GREY, INK = "#9aa3ad", "#1c2024"
DASHES = ("-", "--", "-.", ":")
LETTERS = {"A": "all", "K": "known", "U": "unknown"}
Point = tuple[float, float]  # value and error


def draw(grid: Grid) -> Drawn | None:
    """The figure of a table with all the numbers that it shows; None if there is nothing to show."""
    kinds: dict[str, tuple[Callable[[Grid], Figure | None], str]] = {
        "bars": (bars, "Accuracy of the methods"),
        "stages": (stages, "Accuracy of all, known and unknown classes by session"),
        "ablation": (trend, "Ablation"),
        "sensitivity": (sensitivity, "Sensitivity to the loss weights"),
    }
    make, words = kinds.get(grid.kind, (None, ""))
    figure = make(grid) if make and grid.numbers else None
    if figure is None:
        return None
    rows: list[Row] = [
        (line.label, column.title, *point, "paper" if line.entries[i].number is None else "ours")
        for line in grid.lines for i, column in enumerate(grid.columns) if (point := point_of(line, i))
    ]  # fmt: skip
    return Drawn(grid.name, f"{words}: {grid.title}. {grid.setup}", figure, HEADER, rows)


def point_of(line: Line, index: int | None) -> Point | None:
    """Value and error of a cell, ours or the paper's."""
    entry = Entry() if index is None else line.entries[index]
    if entry.number:
        return entry.number.mean, entry.number.error or 0.0
    return (entry.paper.value, entry.paper.error or 0.0) if entry.paper else None


def error_bars(axes: "Axes", at: Sequence[float], points: Sequence[Point | None], **style: Any) -> None:
    """A line with errors; gaps where there is no number."""
    values = [np.nan if point is None else point[0] for point in points]
    axes.errorbar(at, values, yerr=[0 if point is None else point[1] for point in points], capsize=2, **style)


def bars(grid: Grid) -> "Figure":
    """One panel per column, one bar per line: comparison of methods, the paper's in grey; of A, K, U the averages."""
    indices = [i for i in range(len(grid.columns)) if any(line.entries[i].number for line in grid.lines)]
    indices = [i for i in indices if grid.columns[i].group == "average"] or indices
    lines = [line for line in grid.lines if any(point_of(line, i) for i in indices)]
    figure = new_figure(1.9 * len(indices) + 2.4, 0.27 * len(lines) + 1.2)
    panels = figure.subplots(1, len(indices), sharey=True, squeeze=False)[0]
    for axes, i in zip(panels, indices, strict=True):
        points = {place: point for place, line in enumerate(lines) if (point := point_of(line, i))}
        for place, (value, error) in points.items():
            style: dict[str, Any] = {"color": PALETTE[0] if lines[place].label.startswith("patchgen") else "#c3cad1"}
            if lines[place].paper:
                style = {"color": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
            bar = {"ecolor": INK, "elinewidth": 0.9, "capsize": 2}
            axes.barh(place, value, xerr=error or None, height=0.72, error_kw=bar, **style)
            axes.text(value + error, place, f" {value:.1f}", va="center", fontsize=7.5)
        percent_axis(axes, max(map(sum, points.values()), default=1))
        axes.set_xlabel("accuracy (%)")
        axes.set_title(grid.columns[i].title, fontsize=9.5, parse_math=False)
        plain(axes)
    panels[0].set(yticks=range(len(lines)), ylim=(len(lines) - 0.4, -0.6))
    panels[0].set_yticklabels([line.title for line in lines], fontsize=8.5, parse_math=False)
    for tick, line in zip(panels[0].get_yticklabels(), lines, strict=True):
        tick.set_color("#6b7280" if line.paper else INK)
    return figure


# Sessions of a stream


def stages(grid: Grid) -> "Figure":
    """A/K/U over the sessions, one line per method; below, the mean gain of adding PatchGen to its host."""
    sessions = [name for name in dict.fromkeys(column.group for column in grid.columns) if name != "average"]
    figure = new_figure(9.6, 6.0)
    parts = figure.add_gridspec(2, 3, height_ratios=(3, 2))
    first = figure.add_subplot(parts[0, 0])
    panels = [first, *(figure.add_subplot(parts[0, i], sharey=first) for i in (1, 2))]
    for axes, (letter, title) in zip(panels, LETTERS.items(), strict=True):
        for number, line in enumerate(grid.lines):
            points = [point_of(line, _index(grid, session, letter)) for session in sessions]
            colour, dash = (GREY, ":") if line.paper else (PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)])
            error_bars(axes, range(len(sessions)), points, color=colour, linestyle=dash, markersize=5,
                       marker=MARKERS[number % len(MARKERS)], label=line.title)  # fmt: skip
        axes.set(title=title, xticks=range(len(sessions)))
        axes.set_xticklabels(sessions, fontsize=8.5)
        plain(axes)
    first.set_ylim(top=min(first.get_ylim()[1], 100.8))  # per cent: no margin above 100
    first.set_ylabel("accuracy (%)")
    side_legend(panels[-1], fontsize=8)
    _gain_panel(figure.add_subplot(parts[1, :]), grid)
    return figure


def _index(grid: Grid, group: str, letter: str) -> int | None:
    places = (i for i, column in enumerate(grid.columns) if (column.group, column.heading) == (group, letter))
    return next(places, None)


def gains(grid: Grid) -> list[tuple[str, str, float]]:
    """(host, A | K | U, mean gain over the sessions) of PatchGen over its host, ours and the paper's."""
    lines = {line.title.rstrip("*"): line for line in grid.lines}  # a star in the paper: run again
    differences = []
    for name, line in lines.items():
        host = lines.get(re.sub(r"\+patchgen", "", name, flags=re.IGNORECASE))
        for letter in LETTERS if host and host is not line else ():
            after, before = (point_of(each, _index(grid, "average", letter)) for each in (line, host) if each)
            if after and before:
                differences.append((line.title, letter, after[0] - before[0]))
    return differences


def _gain_panel(axes: "Axes", grid: Grid) -> None:
    differences = gains(grid)
    names = list(dict.fromkeys(name for name, _, _ in differences))
    for number, letter in enumerate(LETTERS):
        of_letter = [
            (names.index(name) + 0.26 * (number - 1), gain) for name, way, gain in differences if way == letter
        ]
        drawn = axes.bar([at for at, _ in of_letter], [gain for _, gain in of_letter], width=0.24,
                         color=PALETTE[number], label=letter)  # fmt: skip
        axes.bar_label(drawn, fmt="%+.1f", fontsize=8, padding=2)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xticks=range(len(names)), ylabel="gain (points)", title="PatchGen over its host, mean of the sessions")
    axes.set_xticklabels([name.replace(", ", "\n") for name in names], fontsize=8.5, parse_math=False)
    axes.margins(y=0.2)
    plain(axes)
    if names:
        axes.legend(frameon=False, ncols=3, fontsize=8.5)
    else:
        axes.text(0.5, 0.5, "no pair of a host with and without PatchGen", ha="center", transform=axes.transAxes)


# Ablation and sensitivity


def series(axes: "Axes", at: Sequence[float], grid: Grid, lines: Sequence[Line], indices: Sequence[int]) -> None:
    """One series per column over some lines, SWAD dashed and the paper's grey."""
    for number, i in enumerate(indices):
        column, points = grid.columns[i], [point_of(line, i) for line in lines]
        if any(points):
            error_bars(axes, at, points, marker=MARKERS[number % len(MARKERS)], label=column.title,
                       linestyle=DASHES[column.checkpoint == "swad"],
                       color=GREY if column.paper else PALETTE[number % len(PALETTE)])  # fmt: skip


def trend(grid: Grid) -> "Figure":
    """The average as parts are added, ours and the paper's; and the gain of 3.5 over 1.1 by data set."""
    ours = [i for i, column in enumerate(grid.columns) if not column.paper]
    shown = [i for i in ours if grid.columns[i].heading == "average"] or ours[-1:]
    shown += [i for i, column in enumerate(grid.columns) if column.heading == "paper, average"]
    figure = new_figure(10.6, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    series(left, range(len(grid.lines)), grid, grid.lines, shown)
    left.set(xticks=range(len(grid.lines)), xlabel="row", ylabel="accuracy (%)", title="as parts are added")
    left.set_xticklabels([line.label.split()[0] for line in grid.lines])
    left.legend(frameon=False, fontsize=8)
    pairs = [(grid.columns[i], point_of(grid.lines[0], i), point_of(grid.lines[-1], i)) for i in ours]
    gained = [(column, b[0] - a[0], float(np.hypot(a[1], b[1]))) for column, a, b in pairs if a and b]
    right.bar(range(len(gained)), [gain for _, gain, _ in gained], yerr=[error for *_, error in gained], capsize=2,
              color=[PALETTE[column.checkpoint == "swad"] for column, _, _ in gained], ecolor=INK)  # fmt: skip
    right.axhline(0, color=INK, linewidth=0.8)
    right.set(xticks=range(len(gained)), ylabel="points", title="gain of 3.5 over 1.1")
    names = [column.heading + "\nSWAD" * (column.checkpoint == "swad") for column, _, _ in gained]
    right.set_xticklabels(names, fontsize=8, rotation=30, ha="right", parse_math=False)
    for axes in (left, right):
        plain(axes)
    return figure


def sensitivity(grid: Grid) -> "Figure | None":
    """One panel per varied weight: accuracy over its values."""
    blocks = [b for b in dict.fromkeys(line.block for line in grid.lines) if b.startswith("sensitivity to")]
    if not blocks:
        return None
    figure = new_figure(4.0 * len(blocks) + 2.2, 3.5)
    panels = figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0]
    for axes, block in zip(panels, blocks, strict=True):
        name = block.rpartition(" ")[2]
        lines = [line for line in grid.lines if line.block == block]
        values = [re.search(rf"{name} ([\d.e+-]+)", line.label) for line in lines]
        at = [float(value[1]) if value else 0.25 for value in values]  # tau's default is not written
        series(axes, at, grid, lines, range(len(grid.columns)))
        axes.set(xlabel=name, xscale="linear" if name == "tau" else "log")
        plain(axes)
    panels[0].set_ylabel("accuracy (%)")
    side_legend(panels[-1], fontsize=8)
    return figure

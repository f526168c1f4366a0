"""The figures of a report, each from one grid: bars, domains, sessions with gains, stacks, ablation, sensitivity.

Ours has error bars (standard error over seeds); the paper's numbers are grey and hatched or dashed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.draw.plots import MARKERS, PALETTE, Drawn, Row, cap_percent, new_figure, percent_axis, plain
from patchgen.report.render import heading, label_text
from patchgen.report.table import Column, Grid, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = ("line", "column", "value", "standard_error", "whose")
GREY = "#9aa3ad"
DASHES = ("-", "--", "-.", ":")


def draw(grid: Grid) -> Drawn | None:
    """The figure of a grid; None if there is nothing to show."""
    kinds: dict[str, Callable[[Grid], Drawn | None]] = {
        "bars": bars, "domains": domains, "stages": stages, "stacked": stacked, "ablation": trend,
        "sensitivity": sensitivity,
    }  # fmt: skip
    maker = kinds.get(grid.kind)
    has_numbers = any(entry.number for line in grid.lines for entry in line.entries)
    return maker(grid) if maker and has_numbers else None


def value_of(line: Line, index: int) -> tuple[float, float] | None:
    """Value and error of a cell, ours or the paper's."""
    entry = line.entries[index]
    if entry.number is not None:
        return entry.number.mean, entry.number.error or 0.0
    if entry.paper is not None:
        return entry.paper.value, entry.paper.error or 0.0
    return None


def rows_of(grid: Grid, indices: Sequence[int]) -> list[Row]:
    """The drawn values, for the CSV."""
    return [
        (line.label, heading(grid.columns[i]), *found, "paper" if line.entries[i].number is None else "ours")
        for line in grid.lines
        for i in indices
        if (found := value_of(line, i)) is not None
    ]


def _drawn(grid: Grid, figure: Any, indices: Sequence[int], text: str) -> Drawn:
    return Drawn(grid.name, f"{text}: {grid.title}. {grid.setup}", figure, HEADER, rows_of(grid, indices))


# Bars


def bars(grid: Grid) -> Drawn | None:
    """One panel per column, one bar per line: comparison of methods, the paper's in grey."""
    indices = [i for i in range(len(grid.columns)) if any(line.entries[i].number for line in grid.lines)]
    lines = [line for line in grid.lines if any(value_of(line, i) for i in indices)]
    figure = new_figure(1.9 * len(indices) + 2.4, 0.27 * len(lines) + 1.2)
    panels = figure.subplots(1, len(indices), sharey=True, squeeze=False)[0]
    for axes, i in zip(panels, indices, strict=True):
        _bar_panel(axes, lines, i)
        axes.set_title(heading(grid.columns[i]), fontsize=9.5, parse_math=False)
    _method_ticks(panels[0], lines)
    return _drawn(grid, figure, indices, "Accuracy of the methods")


def _bar_panel(axes: Axes, lines: Sequence[Line], index: int) -> None:
    for place, line in enumerate(lines):
        found = value_of(line, index)
        if found is None:
            continue
        own = line.label.startswith("patchgen")
        style: dict[str, Any] = {"color": PALETTE[0] if own else "#c3cad1"}
        if line.paper:
            style = {"color": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
        error = {"ecolor": "#1c2024", "elinewidth": 0.9, "capsize": 2}
        axes.barh(place, found[0], xerr=found[1] or None, height=0.72, error_kw=error, **style)
        axes.text(found[0] + found[1], place, f" {found[0]:.1f}", va="center", fontsize=7.5)
    values = [sum(found) for line in lines if (found := value_of(line, index))]
    percent_axis(axes, max(values, default=1))
    axes.set_xlabel("accuracy (%)")
    plain(axes)


def _method_ticks(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set(yticks=range(len(lines)), ylim=(len(lines) - 0.4, -0.6))
    axes.set_yticklabels([label_text(line) for line in lines], fontsize=8.5, parse_math=False)
    for tick, line in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_color("#6b7280" if line.paper else "#1c2024")


# Unseen domains


def domains(grid: Grid) -> Drawn | None:
    """Domains across, one mark per method, ours with error bars; the paper's hollow."""
    lines = [line for line in grid.lines if any(value_of(line, i) for i in range(len(grid.columns)))]
    figure = new_figure(1.25 * len(grid.columns) + 3.6, max(3.0, 0.2 * len(lines) + 1.6))
    axes = figure.subplots()
    for number, line in enumerate(lines):
        at = np.arange(len(grid.columns)) + 0.7 * ((number + 0.5) / len(lines) - 0.5)
        found = [value_of(line, i) for i in range(len(grid.columns))]
        colour = GREY if line.paper else PALETTE[number % len(PALETTE)]
        face = "white" if line.paper else colour
        values = [np.nan if v is None else v[0] for v in found]
        axes.errorbar(at, values, yerr=[0 if v is None else v[1] for v in found], color=colour, linestyle="", capsize=2,
                      marker=MARKERS[number % len(MARKERS)], markerfacecolor=face, label=label_text(line))  # fmt: skip
    for edge in range(len(grid.columns) - 1):
        axes.axvline(edge + 0.5, color="#dde1e6", linewidth=0.8)
    axes.set(xticks=range(len(grid.columns)), ylabel="accuracy (%)", xlim=(-0.5, len(grid.columns) - 0.5))
    axes.set_xticklabels([heading(column) for column in grid.columns], parse_math=False)
    cap_percent(axes)
    plain(axes)
    _legend(axes)
    return _drawn(grid, figure, range(len(grid.columns)), "Accuracy by unseen domain")


def _legend(axes: Axes) -> None:
    legend = axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for text in legend.get_texts():
        text.set_parse_math(False)


# Sessions of a stream


def stages(grid: Grid) -> Drawn | None:
    """A/K/U over the sessions, one line per method; below, the mean gain of adding PatchGen to its host."""
    sessions = [name for name in dict.fromkeys(column.group for column in grid.columns) if name != "average"]
    figure = new_figure(9.6, 6.0)
    parts = figure.add_gridspec(2, 3, height_ratios=(3, 2))
    panels = [figure.add_subplot(parts[0, 0])]
    panels += [figure.add_subplot(parts[0, i], sharey=panels[0]) for i in (1, 2)]
    for axes, letter in zip(panels, "AKU", strict=True):
        for number, line in enumerate(grid.lines):
            _session_line(axes, grid, line, number, letter, sessions)
        axes.set(title={"A": "all", "K": "known", "U": "unknown"}[letter], xticks=range(len(sessions)))
        axes.set_xticklabels(sessions, fontsize=8.5)
        plain(axes)
    cap_percent(panels[0])
    panels[0].set_ylabel("accuracy (%)")
    _legend(panels[-1])
    _gain_panel(figure.add_subplot(parts[1, :]), grid)
    return _drawn(grid, figure, range(len(grid.columns)), "Accuracy of all, known and unknown classes by session")


def _session_line(axes: Axes, grid: Grid, line: Line, number: int, letter: str, sessions: Sequence[str]) -> None:
    places = [_index(grid, session, letter) for session in sessions]
    found = [None if i is None else value_of(line, i) for i in places]
    values = [np.nan if v is None else v[0] for v in found]
    colour = GREY if line.paper else PALETTE[number % len(PALETTE)]
    axes.errorbar(range(len(sessions)), values, yerr=[0 if v is None else v[1] for v in found], color=colour, capsize=2,
                  linestyle=":" if line.paper else DASHES[number % len(DASHES)], marker=MARKERS[number % len(MARKERS)],
                  markersize=5, label=label_text(line))  # fmt: skip


def _index(grid: Grid, group: str, letter: str) -> int | None:
    found = (i for i, column in enumerate(grid.columns) if (column.group, column.heading) == (group, letter))
    return next(found, None)


def gains(grid: Grid) -> list[tuple[str, str, float]]:
    """(host, A | K | U, mean gain over the sessions) of PatchGen over its host, ours and the paper's."""
    plain_names = {label_text(line): line for line in grid.lines}
    found = []
    for name, line in plain_names.items():
        host = plain_names.get(re.sub(r"\+patchgen", "", name, flags=re.IGNORECASE).rstrip("*"))
        host = host or plain_names.get(
            re.sub(r"\+patchgen", "", name, flags=re.IGNORECASE) + "*"
        )  # starred in the paper
        if host is None or host is line:
            continue
        for letter in "AKU":
            i = _index(grid, "average", letter)
            pair = (None, None) if i is None else (value_of(line, i), value_of(host, i))
            if pair[0] and pair[1]:
                found.append((label_text(line), letter, pair[0][0] - pair[1][0]))
    return found


def _gain_panel(axes: Axes, grid: Grid) -> None:
    found = gains(grid)
    names = list(dict.fromkeys(name for name, _, _ in found))
    for number, letter in enumerate("AKU"):
        mine = [(names.index(name), gain) for name, way, gain in found if way == letter]
        at = [place + 0.26 * (number - 1) for place, _ in mine]
        drawn = axes.bar(at, [gain for _, gain in mine], width=0.24, color=PALETTE[number], label=letter)
        axes.bar_label(drawn, fmt="%+.1f", fontsize=8, padding=2)
    axes.axhline(0, color="#1c2024", linewidth=0.8)
    axes.set(xticks=range(len(names)), ylabel="gain (points)", title="PatchGen over its host, mean of the sessions")
    axes.set_xticklabels([name.replace(", ", "\n") for name in names], fontsize=8.5, parse_math=False)
    axes.margins(y=0.2)
    plain(axes)
    if names:
        axes.legend(frameon=False, ncols=3, fontsize=8.5)
    else:
        axes.text(0.5, 0.5, "no pair of a host with and without PatchGen", ha="center", transform=axes.transAxes)


# Unknown classes in unseen domains


def stacked(grid: Grid) -> Drawn | None:
    """A, K and U: each method's accuracies of the unseen domains, stacked; a full stack is 100 x their number."""
    groups = [name for name in dict.fromkeys(column.group for column in grid.columns) if name != "average"]
    lines = [line for line in grid.lines if any(entry.number for entry in line.entries)]
    figure = new_figure(10.2, 0.33 * len(lines) + 1.9)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, letter in zip(panels, "AKU", strict=True):
        left = np.zeros(len(lines))
        for number, group in enumerate(groups):
            i = _index(grid, group, letter)
            found = [None if i is None else value_of(line, i) for line in lines]
            values = np.array([0 if v is None else v[0] for v in found])
            axes.barh(range(len(lines)), values, left=left, height=0.7, color=PALETTE[number % len(PALETTE)],
                      edgecolor="white", hatch=("", "//", "..", "xx")[number % 4], label=group)  # fmt: skip
            left += values
        axes.set(title={"A": "all", "K": "known", "U": "unknown"}[letter], xlabel="sum of accuracies (%)")
        plain(axes)
    _method_ticks(panels[0], lines)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return _drawn(grid, figure, range(len(grid.columns)), "Accuracy by unseen domain, stacked")


# Ablation


def trend(grid: Grid) -> Drawn | None:
    """The average as parts are added, ours and the paper's; and the gain of 3.5 over 1.1 by data set."""
    ours = [i for i, column in enumerate(grid.columns) if not column.paper]
    shown = [i for i in ours if grid.columns[i].heading == "average"] or ours[-1:]
    papers = [i for i, c in enumerate(grid.columns) if c.paper and c.heading == "paper, average"]
    figure = new_figure(10.6, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [line.label.split()[0] for line in grid.lines]
    for number, i in enumerate([*shown, *papers]):
        found = [value_of(line, i) for line in grid.lines]
        column = grid.columns[i]
        label = f"{'paper' if column.paper else column.heading}, {column.group}"
        style = DASHES[1 if column.checkpoint == "swad" else 0]
        left.errorbar(range(len(names)), [np.nan if v is None else v[0] for v in found], capsize=2, linestyle=style,
                      yerr=[0 if v is None else v[1] for v in found], marker=MARKERS[number],
                      color=GREY if column.paper else PALETTE[number], label=label)  # fmt: skip
    left.set(xticks=range(len(names)), xlabel="row", ylabel="accuracy (%)", title="as parts are added")
    left.set_xticklabels(names)
    left.legend(frameon=False, fontsize=8)
    _gain_bars(right, grid, ours)
    for axes in (left, right):
        plain(axes)
    return _drawn(grid, figure, range(len(grid.columns)), "Ablation")


def _gain_bars(axes: Axes, grid: Grid, indices: Sequence[int]) -> None:
    first, last = grid.lines[0], grid.lines[-1]
    found: list[tuple[Column, float, float]] = []
    for i in indices:
        a, b = value_of(first, i), value_of(last, i)
        if a and b:
            found.append((grid.columns[i], b[0] - a[0], float(np.hypot(a[1], b[1]))))
    colours = [PALETTE[0] if column.checkpoint == "selected" else PALETTE[1] for column, _, _ in found]
    axes.bar(range(len(found)), [gain for _, gain, _ in found], yerr=[error for _, _, error in found], color=colours,
             capsize=2, ecolor="#1c2024")  # fmt: skip
    axes.axhline(0, color="#1c2024", linewidth=0.8)
    axes.set(xticks=range(len(found)), ylabel="points", title="gain of 3.5 over 1.1")
    axes.set_xticklabels([c.heading + "\nSWAD" * (c.checkpoint == "swad") for c, _, _ in found], fontsize=8,
                         rotation=30, ha="right", parse_math=False)  # fmt: skip


# Sensitivity


def sensitivity(grid: Grid) -> Drawn | None:
    """One panel per varied weight: accuracy over its values, one line per fold, the paper's dashed."""
    blocks = [b for b in dict.fromkeys(line.block for line in grid.lines) if b.startswith("sensitivity to")]
    if not blocks:
        return None
    figure = new_figure(4.0 * len(blocks) + 2.2, 3.5)
    panels = figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0]
    for axes, block in zip(panels, blocks, strict=True):
        name = block.rpartition(" ")[2]
        lines = [line for line in grid.lines if line.block == block]
        at = [_weight(line.label, name) for line in lines]
        for number, column in enumerate(grid.columns):
            found = [value_of(line, number) for line in lines]
            if any(found):
                swad = column.checkpoint == "swad"
                axes.errorbar(at, [np.nan if v is None else v[0] for v in found], label=heading(column), capsize=2,
                              yerr=[0 if v is None else v[1] for v in found], linestyle="--" if swad else "-",
                              marker=MARKERS[number % len(MARKERS)],
                              color=GREY if column.paper else PALETTE[number % len(PALETTE)])  # fmt: skip
        axes.set(xlabel=name, xscale="linear" if name == "tau" else "log")
        plain(axes)
    panels[0].set_ylabel("accuracy (%)")
    _legend(panels[-1])
    return _drawn(grid, figure, range(len(grid.columns)), "Sensitivity to the loss weights")


def _weight(label: str, name: str) -> float:
    """The value after a name in `lambda_ms 0.01, lambda_sim 0.001`; tau's default is not written."""
    found = re.search(rf"{name} ([\d.e+-]+)", label)
    return float(found[1]) if found else 0.25

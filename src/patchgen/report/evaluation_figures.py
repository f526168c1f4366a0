"""The two figures of an evaluation: the confusion matrix, and confidence against accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from patchgen.common.text import printable
from patchgen.draw.plots import PALETTE, Drawn, Row, new_figure, plain

MOST_NUMBERS, MOST_NAMES = 25, 60  # classes up to which cells have numbers, and rows and columns their names
LONGEST = 24  # characters of a class name in a figure


def confusion_figure(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Drawn:
    """Rows true, columns predicted; colours are shares of a row, numbers are images."""
    matrix = np.array(counts, dtype=float)
    total = matrix.sum(1, keepdims=True)
    share = np.divide(matrix, total, out=np.zeros_like(matrix), where=total > 0)
    side = min(2.6 + 0.42 * len(classes), 12.0)
    figure = new_figure(side + 0.9, side)
    axes = figure.subplots()
    drawn = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=axes, shrink=0.8, label="share of the true class's images")
    if len(classes) <= MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(matrix.astype(int)):
            colour = "#fefefe" if share[row, column] > 0.65 else "#101418"  # on the cell, in any theme of the page
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=colour, fontsize=9)
    axes.set(xlabel="predicted", ylabel="true", xticks=[], yticks=[])
    if len(classes) <= MOST_NAMES:
        names, places = [_short(name) for name in classes], range(len(classes))
        axes.set_yticks(places, names, parse_math=False, fontsize=9)
        steep = max(map(len, names)) * len(names) > 24
        turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if steep else {}
        axes.set_xticks(places, names, parse_math=False, fontsize=9, **turn)
    axes.spines[:].set_visible(False)
    rows: list[Row] = [
        (true, said, int(matrix[i, j])) for i, true in enumerate(classes) for j, said in enumerate(classes)
    ]
    return Drawn("confusion", "Confusion matrix: true classes down, predicted classes across", figure,
                 ("true", "predicted", "images"), rows)  # fmt: skip


def reliability_figure(bins: Sequence[Mapping[str, Any]]) -> Drawn:
    """Accuracy in bins of confidence, and how many images each bin holds."""
    figure = new_figure(5.6, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = [one for one in bins if one["images"]]
    upper.plot([0, 1], [0, 1], linestyle="--", color="#6b7280", linewidth=1, label="perfect calibration")
    upper.plot([one["confidence"] for one in filled], [one["accuracy"] for one in filled], marker="o",
               color=PALETTE[0], label="the model")  # fmt: skip
    upper.set(ylabel="accuracy", ylim=(-0.02, 1.02), xlim=(0, 1))
    upper.legend(frameon=False, loc="upper left", fontsize=9)
    width = bins[0]["high"] - bins[0]["low"]
    lower.bar([one["low"] for one in bins], [one["images"] for one in bins], width, align="edge", color="#c3cad1",
              edgecolor="white")  # fmt: skip
    lower.set(xlabel="confidence", ylabel="images")
    for axes in (upper, lower):
        plain(axes)
    header = ("low", "high", "images", "confidence", "accuracy")
    rows: list[Row] = [["" if one[name] is None else one[name] for name in header] for one in bins]
    return Drawn("reliability", "Accuracy of the answers in bins of their confidence", figure, header, rows)


def _short(name: str) -> str:
    text = printable(name)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"

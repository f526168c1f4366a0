"""One table from many runs: methods down, unseen domains across, mean and standard error over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from patchgen.train.records import RunFolder
from patchgen.train.selection import RULES

PARTS = {"in": "80 % of the unseen domain", "all": "the whole unseen domain"}
CHECKPOINTS = {"selected": "selected checkpoint", "swad": "SWAD"}


@dataclass(frozen=True)
class Cell:
    """One number and where it comes from."""

    method: str
    unseen: str
    seed: int
    checkpoint: str  # selected | swad
    part: str  # in | all
    accuracy: float
    f1: float
    images: int
    validation: float  # source validation of the chosen evaluation: what lr and checkpoint were chosen by
    mask_mean: float | None
    mask_spread: float | None
    lr: float
    select: str
    run: str


def cells_of(run: RunFolder, label: str) -> list[Cell]:
    """All reported numbers of a finished run."""
    config = run.config
    tests = run.records("test")
    chosen = next(record for record in tests if record["checkpoint"] == "selected")
    evaluation = next(record for record in run.records("evaluation") if record["step"] == chosen["step"])
    score = RULES["source-validation"](evaluation, chosen.get("metric", "accuracy"))
    return [
        Cell(
            label, config.unseen, config.seed, record["checkpoint"], part, record[part]["accuracy"],
            record[part]["f1"], record[part]["images"], score, record.get("mask", {}).get("mean"),
            record.get("mask", {}).get("spread"), config.lr, config.select, run.path.name,
        )
        for record in tests
        for part in PARTS
    ]  # fmt: skip


def best_by_validation(cells: Iterable[Cell]) -> list[Cell]:
    """Where a cell was run with several learning rates, keep the one that source validation prefers."""
    best: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        key = (cell.method, cell.unseen, cell.seed, cell.checkpoint, cell.part)
        if key not in best or cell.validation > best[key].validation:
            best[key] = cell
    return list(best.values())


def accuracy_table(
    cells: Sequence[Cell], methods: Sequence[str], domains: Sequence[str], checkpoint: str, part: str
) -> str:
    """Markdown: per domain and average, in per cent; a cell that was not run is empty."""
    rows = []
    for method in methods:
        mine = [c for c in cells if (c.method, c.checkpoint, c.part) == (method, checkpoint, part)]
        found = {domain: [c.accuracy for c in mine if c.unseen == domain] for domain in domains}
        rows.append([method, *(_mean(values) for values in found.values()), _mean(_averages(mine, domains))])
    return markdown(["method", *domains, "average"], rows)


def validation_table(cells: Sequence[Cell], methods: Sequence[str], domains: Sequence[str]) -> str:
    """Markdown: what the choice was made by (source validation), and the mask on the unseen images."""
    rows = []
    for method in methods:
        mine = [c for c in cells if (c.method, c.checkpoint, c.part) == (method, "selected", "all")]
        per_domain = [_mean([c.validation for c in mine if c.unseen == domain]) for domain in domains]
        masks = [f"{c.mask_mean:.2f}/{c.mask_spread:.2f}" for d in domains for c in mine
                 if c.unseen == d and c.mask_mean is not None and c.mask_spread is not None]  # fmt: skip
        rows.append([method, *per_domain, ", ".join(masks)])
    return markdown(["method", *domains, "mask mean/spread per unseen domain"], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, as readable in a terminal as on a page."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _averages(cells: Sequence[Cell], domains: Sequence[str]) -> list[float]:
    """Mean over domains for each seed that has them all."""
    seeds = sorted({c.seed for c in cells})
    by_seed = {seed: {c.unseen: c.accuracy for c in cells if c.seed == seed} for seed in seeds}
    return [sum(found[d] for d in domains) / len(domains) for found in by_seed.values() if set(domains) <= set(found)]


def _mean(values: Sequence[float]) -> str:
    """Per cent, with the standard error over seeds where there are several."""
    if not values:
        return ""
    text = f"{100 * statistics.fmean(values):.1f}"
    if len(values) > 1:
        text += f" ± {100 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"
    return text

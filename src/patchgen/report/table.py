"""One table from many runs: methods down, unseen domains across, mean and standard error over seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from patchgen.common.text import markdown
from patchgen.runs.scores import METRICS, Cell

RECOVERY = {"auroc": "AUROC", "iou": "IoU at 0.5", "error": "mask error", "kept": "predictive kept"}
GIVEN = {"true": "true mask %", "random": "random mask %"}
CHECKPOINTS = {"selected": "selected checkpoint", "swad": "SWAD"}


def best_by_validation(cells: Iterable[Cell]) -> list[Cell]:
    """If a cell was run with several learning rates, keep the best on source validation."""
    best: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        key = (cell.method, cell.unseen, cell.seed, cell.checkpoint, cell.part)
        if key not in best or cell.validation > best[key].validation:
            best[key] = cell
    return list(best.values())


def backbone_line(cells: Iterable[Cell]) -> str:
    """The backbones of the runs: `auto` may have resolved to different weights."""
    found = Counter({cell.run: cell.backbone for cell in cells}.values())
    if len(found) > 1:
        named = "; ".join(f"{name} ({count} runs)" for name, count in found.items())
        return f"Backbones DIFFER, so the figures cannot be compared: {named}"
    return f"Backbone: {next(iter(found), 'no run is finished yet')}"


def accuracy_table(
    cells: Sequence[Cell], methods: Sequence[str], domains: Sequence[str], checkpoint: str, part: str, seeds: int = 1
) -> str:
    """Markdown: per domain and average, in per cent; a cell that was not run is empty.

    A cell with fewer than `seeds` seeds says so. If classes were discovered, a cell has three numbers, All / Known /
    Unknown.
    """
    rows = []
    for method in methods:
        mine = [c for c in cells if (c.method, c.checkpoint, c.part) == (method, checkpoint, part)]
        columns = [[c for c in mine if c.unseen == domain] for domain in domains]
        row = [_scores([[c] for c in column], seeds) for column in columns]
        rows.append([method, *row, _scores(_whole_seeds(mine, domains), seeds)])
    return markdown(["method", *domains, "average"], rows)


def metrics_table(cells: Sequence[Cell], methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> str:
    """Markdown: the other scores on the whole unseen domain, means over domains and seeds, in per cent.

    Only seeds that have every domain; empty if no run has recorded them.
    """
    mine = [c for c in cells if (c.checkpoint, c.part) == ("selected", "all")]
    names = [name for name in METRICS if any(name in cell.metrics for cell in mine)]
    rows = []
    for method in methods if names else ():
        groups = _whole_seeds([c for c in mine if c.method == method], domains)
        row = []
        for name in names:
            whole = [group for group in groups if all(name in c.metrics for c in group)]
            row.append(_mean([statistics.fmean(c.metrics[name] for c in group) for group in whole], seeds))
        rows.append([method, *row])
    return markdown(["method", *(METRICS[name] for name in names)], rows) if rows else ""


def validation_table(cells: Sequence[Cell], methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> str:
    """Markdown: source validation, by which settings are chosen, and the mask on the unseen images."""
    rows = []
    for method in methods:
        mine = [c for c in cells if (c.method, c.checkpoint, c.part) == (method, "selected", "all")]
        per_domain = [_mean([c.validation for c in mine if c.unseen == domain], seeds) for domain in domains]
        masks = [f"{c.mask['mean']:.2f}/{c.mask['spread']:.2f}" for d in domains for c in mine
                 if c.unseen == d and "spread" in c.mask]  # fmt: skip
        rows.append([method, *per_domain, ", ".join(masks)])
    return markdown(["method", *domains, "mask mean/spread per unseen domain"], rows)


def recovery_table(cells: Sequence[Cell], methods: Sequence[str], seeds: int = 1) -> str:
    """Markdown: masks against the truth on the unseen images, and accuracy with a mask that is not the learned one.

    Empty if the truth is unknown.
    """
    rows = []
    for method in methods:
        mine = [c for c in cells if (c.method, c.checkpoint, c.part) == (method, "selected", "all") and "iou" in c.mask]
        if mine:
            learned = _mean([c.accuracy for c in mine], seeds)
            given = [_mean([c.given_mask[kind] for c in mine if kind in c.given_mask], seeds) for kind in GIVEN]
            found = [_plain([c.mask[name] for c in mine if name in c.mask]) for name in RECOVERY]
            rows.append([method, *found, learned, *given])
    return markdown(["method", *RECOVERY.values(), "learned mask %", *GIVEN.values()], rows) if rows else ""


def _whole_seeds(cells: Sequence[Cell], domains: Sequence[str]) -> list[list[Cell]]:
    """The cells of each seed that has all the domains."""
    by_seed = {seed: {c.unseen: c for c in cells if c.seed == seed} for seed in sorted({c.seed for c in cells})}
    return [[found[d] for d in domains] for found in by_seed.values() if set(domains) <= set(found)]


def _scores(groups: Sequence[Sequence[Cell]], seeds: int) -> str:
    """Mean over each group, then over the groups (seeds): accuracy, or All / Known / Unknown."""
    names = ("accuracy", "known", "unknown") if groups and groups[0][0].known is not None else ("accuracy",)
    means = [[statistics.fmean(getattr(cell, name) for cell in group) for group in groups] for name in names]
    return " / ".join(_mean(values, seeds) for values in means)


def _plain(values: Sequence[float]) -> str:
    """A number of masks, with its standard error over seeds."""
    return f"{statistics.fmean(values):.2f}{_error(values, 1, 2)}" if values else ""


def _error(values: Sequence[float], scale: float, digits: int) -> str:
    if len(values) < 2:
        return ""
    return f" ± {scale * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def _mean(values: Sequence[float], seeds: int) -> str:
    """Per cent, with the standard error over seeds where there are several, and their number where some are missing."""
    if not values:
        return ""
    text = f"{100 * statistics.fmean(values):.1f}{_error(values, 100, 1)}"
    return text if len(values) >= seeds else f"{text} ({len(values)} of {seeds} seeds)"

"""What `patchgen compare` prints: accuracy by unseen domain, other scores, masks, and a conclusion in sentences.

    scores = read_scores([(folder, "lp-ln"), ...])
    print(comparison(scores, methods, domains))
    for line in verdict(scores, methods, domains): print(line)
    # Best on average: lp-ln (81.4 %).
    # Against patchgen: 4 of 264 images apart, one seed: no difference shown.

The rule of the verdict is that of `fit/choose.py`: the mean difference over unseen domains must exceed the variation
between domains and the sampling error of the images; the level of 5 % is shared by all comparisons. Runs record
accuracies, not single images, so the images count as unpaired, which is stricter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.fit.choose import LEVEL, reach
from patchgen.report.render import plain_markdown
from patchgen.report.table import Best, Column, Entry, Grid, Line, best_runs, fill, gather, unequal_terms
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import FACTS, METRICS, PARTS, SCORE, read_runs

if TYPE_CHECKING:
    import pandas as pd

CHECKPOINTS = {"selected": "selected checkpoint", "swad": "SWAD"}
RECOVERY = {"auroc": "AUROC", "iou": "IoU at 0.5", "error": "mask error", "kept": "predictive kept"}
MASKS = {"accuracy": "learned mask %", "mask: true mask": "true mask %", "mask: random mask": "random mask %"}
DISCOVERED = ("all", "known", "unknown")
MOST_RIVALS = 5  # others that are compared with the best


def read_scores(runs: Iterable[tuple[RunFolder, str]]) -> pd.DataFrame:
    """The tidy scores of finished runs, each under its label; of several learning rates the best on validation.

    Raises:
        ValueError: a run is broken.
    """
    import pandas as pd

    labels = pd.DataFrame([(run.path, label) for run, label in runs], columns=["path", "method"])
    if labels.empty:
        return pd.DataFrame(columns=[*FACTS, *SCORE])
    scores, skipped = read_runs(labels["path"].unique())
    for folder in skipped:
        raise ValueError(f"{folder.path}: {folder.reason}")
    scores = labels.merge(scores.drop(columns="method"), on="path")
    ranked = scores.sort_values("validation", ascending=False, kind="stable")
    best = ranked.drop_duplicates(["method", "unseen", "seed"])[["method", "run"]]
    return scores.merge(best, on=["method", "run"])


def cells(scores: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """One object per run, checkpoint and part, as JSON writes it."""
    for _, of_run in scores.groupby(["method", "unseen", "seed", "run"], sort=False):
        run: Any = next(of_run.itertuples())  # a named tuple of the columns
        values: dict[Any, Any] = {place: rows.set_index("metric")["value"].to_dict()
                                  for place, rows in of_run.groupby(["checkpoint", "part"], sort=False)}  # fmt: skip
        images = of_run[of_run["images"] > 0].groupby(["checkpoint", "part"])["images"].first()
        for checkpoint in of_run["checkpoint"].unique():
            masks = {name.removeprefix("mask: "): value for name, value in values[checkpoint, "all"].items()
                     if name.startswith("mask: ")}  # fmt: skip
            replaced = {kind: masks.pop(f"{kind} mask") for kind in ("true", "random") if f"{kind} mask" in masks}
            for part in PARTS:
                numbers = values[checkpoint, part]
                yield {
                    "method": run.method, "unseen": run.unseen, "seed": run.seed, "checkpoint": checkpoint,
                    "part": part, "accuracy": numbers.get("accuracy", numbers.get("all")),
                    "images": int(images[checkpoint, part]),
                    "validation": run.validation, **{name: numbers.get(name) for name in ("f1", "known", "unknown")},
                    "mask": masks, "given_mask": replaced if part == "all" else {}, "lr": run.lr,
                    "select": run.selected_by, "run": run.run, "backbone": run.backbone,
                    "metrics": {name: numbers[name] for name in METRICS if name in numbers},
                }  # fmt: skip


def comparison(
    scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1, *,
    swad: bool = True, details: bool = False,
) -> str:  # fmt: skip
    """All tables; with `details` also SWAD, the 80 % part, source validation and other scores.

    Args:
        methods: Labels, a line each.
        domains: Unseen domains, a column each.
        seeds: How many were asked for; a cell with fewer says so.
    """
    names = "All / Known / Unknown accuracy" if "known" in set(scores["metric"]) else "Accuracy"
    grid = accuracy_grid(scores, methods, domains, "selected", "all", seeds)
    notes = [grid.error_note(), *unequal_terms(methods)]
    parts = [
        backbone_line(scores), f"{names}, selected checkpoint, on {PARTS['all']} (%)", plain_markdown(grid),
        "\n".join(filter(None, notes)), "\n".join(verdict(scores, methods, domains)),
    ]  # fmt: skip
    if details:
        for checkpoint, part in [("selected", "in"), *(("swad", part) for part in PARTS if swad)]:
            grid = accuracy_grid(scores, methods, domains, checkpoint, part, seeds)
            parts += [f"{names}, {CHECKPOINTS[checkpoint]}, on {PARTS[part]} (%)", plain_markdown(grid)]
        parts.append("Source validation accuracy (%), by which checkpoints and learning rates are chosen")
        parts.append(plain_markdown(validation_grid(scores, methods, domains, seeds)))
        if others := metrics_grid(scores, methods, domains, seeds):
            parts.append("Other scores (%), selected checkpoint, mean over the whole unseen domains")
            parts.append(plain_markdown(others))
    if masks := recovery_grid(scores, methods, domains, seeds):
        parts += ["Masks against the known predictive patches, on the unseen images", plain_markdown(masks)]
    return "\n\n".join(filter(None, parts))


def backbone_line(scores: pd.DataFrame) -> str:
    """The backbones of the runs: `auto` may have resolved to different weights."""
    counts = scores.drop_duplicates("run")["backbone"].value_counts(sort=False)
    if len(counts) > 1:
        named = "; ".join(f"{name} ({count} runs)" for name, count in counts.items())
        return f"Backbones DIFFER, so the figures cannot be compared: {named}"
    return f"Backbone: {next(iter(counts.index), 'no run is finished yet')}"


def accuracy_grid(
    scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], checkpoint: str, part: str, seeds: int = 1
) -> Grid:
    """Accuracy per domain and on average; All / Known / Unknown in a cell if classes were discovered."""
    metrics = DISCOVERED if "known" in set(scores["metric"]) else ("accuracy",)
    places = [*((domain, [domain]) for domain in domains), ("average", domains)]
    columns = [Column(name, _folds(scores, over), metric, checkpoint) for name, over in places for metric in metrics]
    grid = _grid(scores, methods, columns, seeds, part)
    return grid if len(metrics) == 1 else _joined(grid, len(metrics))


def _joined(grid: Grid, count: int) -> Grid:
    """The table with the numbers of each `count` columns in one."""

    def join(entries: Sequence[Entry]) -> Entry:
        return Entry(text=" / ".join(entry.number.text(grid.seeds) for entry in entries if entry.number))

    places = range(0, len(grid.columns), count)
    lines = [Line(line.label, tuple(join(line.entries[i : i + count]) for i in places)) for line in grid.lines]
    return replace(grid, columns=grid.columns[::count], lines=tuple(lines))


def metrics_grid(scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> Grid | None:
    """The other scores on the whole unseen domain, means over domains; None if no run has recorded them."""
    recorded = set(scores["metric"])
    columns = [Column(text, _folds(scores, domains), name) for name, text in METRICS.items() if name in recorded]
    return _grid(scores, methods, columns, seeds) if columns else None


def validation_grid(scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> Grid:
    """Source validation, by which settings are chosen, and the mask on the unseen images."""
    grid = _grid(scores, methods, [Column(domain, _folds(scores, [domain]), "validation") for domain in domains], seeds)
    lines = []
    for line in grid.lines:
        best = best_runs(scores[scores["method"] == line.label])
        texts = [_mask_text(best, _folds(scores, [domain])) for domain in domains]
        lines.append(replace(line, entries=(*line.entries, Entry(text=", ".join(filter(None, texts))))))
    masks = Column("mask mean/spread per unseen domain", {})
    return replace(grid, columns=(*grid.columns, masks), lines=tuple(lines))


def _mask_text(best: Best, folds: dict[str, Sequence[str]]) -> str:
    """`0.46/0.12`: mean and spread, and behind them those of the untrained mask."""
    texts = []
    for kind in ("", "untrained_"):
        pair = [gather(best, Column("", folds, f"mask: {kind}{name}", scale=1), "all") for name in ("mean", "spread")]
        texts.append("/".join(f"{number.mean:.2f}" for number in pair if number))
    return texts[0] + f" (untrained {texts[1]})" * bool(texts[1])


def recovery_grid(scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> Grid | None:
    """Masks against the truth beside untrained ones, and accuracy with other masks; None if the truth is unknown."""
    known = scores[scores["metric"] == "mask: iou"]
    if known.empty:
        return None
    folds, recorded = _folds(scores, [d for d in domains if d in set(known["unseen"])]), set(scores["metric"])
    columns = []
    for name, text in RECOVERY.items():
        columns.append(Column(text, folds, f"mask: {name}", scale=1, digits=2))
        if f"mask: untrained_{name}" in recorded:
            columns.append(Column("untrained", folds, f"mask: untrained_{name}", scale=1, digits=2))
    columns += [Column(text, folds, metric) for metric, text in MASKS.items()]
    return _grid(scores, [m for m in methods if m in set(known["method"])], columns, seeds)


def _grid(
    scores: pd.DataFrame, methods: Sequence[str], columns: Sequence[Column], seeds: int, part: str = "all"
) -> Grid:
    lines = [Line(method, fill(scores[scores["method"] == method], columns, part)) for method in methods]
    return Grid("", "", "", tuple(columns), tuple(lines), part, asked_seeds=seeds)


def _folds(scores: pd.DataFrame, domains: Sequence[str]) -> dict[str, Sequence[str]]:
    """All runs of a comparison are on one data set."""
    return {next(iter(scores["data"]), ""): domains}


# The conclusion


def verdict(scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str]) -> list[str]:
    """Sentences on the selected checkpoints, scored on the whole unseen domains; empty for fewer than two methods."""
    selected = scores[(scores["checkpoint"] == "selected") & (scores["part"] == "all")]
    accuracies = selected[selected["metric"].isin(["accuracy", "all"])]
    by_fold = accuracies.groupby(["method", "unseen"])
    means, images = by_fold["value"].mean(), by_fold["images"].first()
    whole = {m: means[m].reindex(domains).to_numpy() for m in methods if set(domains) <= set(means.get(m, {}).keys())}
    if len(whole) < 2:
        return []
    best, *others = sorted(whole, key=lambda method: -float(whole[method].mean()))
    counts, level = images[best].reindex(domains).to_numpy(), LEVEL / len(others)
    seeds = accuracies["seed"].nunique()
    lines = [f"Best on average: {best} ({100 * whole[best].mean():.1f} %)."]
    for other in others[:MOST_RIVALS]:
        lines.append(_sentence(other, whole[best], whole[other], counts, seeds, level))
    return lines


def _sentence(other: str, best: np.ndarray, rival: np.ndarray, images: np.ndarray, seeds: int, level: float) -> str:
    """`best` and `rival` are accuracies, `images` the images of each unseen domain."""
    differences = best - rival
    shares = (np.stack([best, rival]) * images + 1) / (images + 2)  # Laplace's rule: variances above 0 at 0 and 100 %
    needed = reach(differences, [*(shares * (1 - shares) / images).sum(0)], level)
    count = "one seed" if seeds == 1 else f"{seeds} seeds"
    text = f"Against {other}: {round(differences @ images)} of {images.sum():,} images apart, {count}"
    if math.isinf(needed):
        return f"{text}, one unseen domain: no difference can be shown for another."
    if differences.mean() > needed:
        return f"{text}: better by more than chance."
    return f"{text}: no difference shown ({100 * needed:.1f} points on average would be)."

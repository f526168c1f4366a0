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
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.fit.choose import LEVEL, reach
from patchgen.report.render import plain_markdown
from patchgen.report.table import Best, Column, Entry, Grid, Line, best_runs, fill, gather, unequal_terms
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import METRICS, PARTS, Skipped, read_run, tidy

if TYPE_CHECKING:
    import pandas as pd

CHECKPOINTS = {"selected": "selected checkpoint", "swad": "SWAD"}
RECOVERY = {"auroc": "AUROC", "iou": "IoU at 0.5", "error": "mask error", "kept": "predictive kept"}
MASKS = {"accuracy": "learned mask %", "mask: true mask": "true mask %", "mask: random mask": "random mask %"}
DISCOVERED = ("all", "known", "unknown")
CELL = ["method", "unseen", "seed", "lr", "selected_by", "run", "backbone"]
MOST_RIVALS = 5  # others that are compared with the best


def read_scores(runs: Iterable[tuple[RunFolder, str]]) -> pd.DataFrame:
    """The tidy scores of finished runs, each under its label; of several learning rates the best on validation.

    Raises:
        ValueError: a run is broken.
    """
    import pandas as pd

    frames = [tidy([])]
    for folder, label in runs:
        run = read_run(folder.path)
        if isinstance(run, Skipped):
            raise ValueError(f"{run.path}: {run.reason}")
        frames.append(tidy([run]).assign(method=label, run=folder.path.name))
    scores = pd.concat([frame for frame in frames if len(frame)] or frames)
    ranked = scores.sort_values("validation", ascending=False, kind="stable")
    best = ranked.drop_duplicates(["method", "unseen", "seed"])[["method", "run"]]
    chosen = set(best.itertuples(index=False, name=None))
    return scores[np.array([pair in chosen for pair in zip(scores["method"], scores["run"], strict=True)], dtype=bool)]


def cells(scores: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """One object per run, checkpoint and part, as JSON writes it."""
    for key, of_run in scores.groupby(CELL, sort=False):
        values: dict[Any, Any] = {place: rows.set_index("metric")["value"].to_dict()
                                  for place, rows in of_run.groupby(["checkpoint", "part"], sort=False)}  # fmt: skip
        about: dict[str, Any] = dict(zip(CELL, key, strict=True))
        for checkpoint in dict.fromkeys(of_run["checkpoint"]):
            whole = values[checkpoint, "all"]
            masks = {name.removeprefix("mask: "): v for name, v in whole.items() if name.startswith("mask: ")}
            given = {kind: masks.pop(f"{kind} mask") for kind in ("true", "random") if f"{kind} mask" in masks}
            for part in PARTS:
                numbers = values[checkpoint, part]
                rows = of_run[(of_run["checkpoint"] == checkpoint) & (of_run["part"] == part) & (of_run["images"] > 0)]
                yield {
                    "method": about["method"], "unseen": about["unseen"], "seed": int(about["seed"]),
                    "checkpoint": checkpoint, "part": part, "accuracy": numbers.get("accuracy", numbers.get("all")),
                    "images": int(rows["images"].iloc[0]), "validation": float(of_run["validation"].iloc[0]),
                    **{name: numbers.get(name) for name in ("f1", "known", "unknown")},
                    "mask": masks, "given_mask": given if part == "all" else {}, "lr": about["lr"],
                    "select": about["selected_by"], "run": about["run"], "backbone": about["backbone"],
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
    folds = [*((domain, [domain]) for domain in domains), ("average", domains)]

    def entry(best: Best, name: str, over: Sequence[str]) -> Entry:
        numbers = [gather(best, Column(name, _folds(scores, over), metric, checkpoint), part) for metric in metrics]
        if len(metrics) == 1:
            return Entry(numbers[0])
        return Entry(text=" / ".join(number.text(seeds) for number in numbers if number))

    columns = [Column(name, _folds(scores, over), "accuracy", checkpoint) for name, over in folds]
    lines = []
    for method in methods:
        best = best_runs(scores[scores["method"] == method])
        lines.append(Line(method, tuple(entry(best, *fold) for fold in folds)))
    return Grid("accuracy", "", "", tuple(columns), tuple(lines), part, asked_seeds=seeds)


def metrics_grid(scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> Grid | None:
    """The other scores on the whole unseen domain, means over domains; None if no run has recorded them."""
    recorded = set(scores["metric"])
    columns = [Column(text, _folds(scores, domains), name) for name, text in METRICS.items() if name in recorded]
    return _grid("scores", scores, methods, columns, seeds) if columns else None


def validation_grid(scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1) -> Grid:
    """Source validation, by which settings are chosen, and the mask on the unseen images."""
    columns = [Column(domain, _folds(scores, [domain]), "validation") for domain in domains]
    masks = Column("mask mean/spread per unseen domain", {})
    lines = []
    for method in methods:
        of_method = scores[scores["method"] == method]
        texts = [_mask_text(best_runs(of_method), _folds(scores, [domain])) for domain in domains]
        lines.append(Line(method, (*fill(of_method, columns, "all"), Entry(text=", ".join(filter(None, texts))))))
    return Grid("validation", "", "", (*columns, masks), tuple(lines), asked_seeds=seeds)


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
    return _grid("masks", scores, [m for m in methods if m in set(known["method"])], columns, seeds)


def _grid(name: str, scores: pd.DataFrame, methods: Sequence[str], columns: Sequence[Column], seeds: int) -> Grid:
    lines = [Line(method, fill(scores[scores["method"] == method], columns, "all")) for method in methods]
    return Grid(name, "", "", tuple(columns), tuple(lines), asked_seeds=seeds)


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
    needed = reach(differences, [*(_variance(best, images) + _variance(rival, images))], level)
    count = "one seed" if seeds == 1 else f"{seeds} seeds"
    text = f"Against {other}: {round(differences @ images)} of {images.sum():,} images apart, {count}"
    if math.isinf(needed):
        return f"{text}, one unseen domain: no difference can be shown for another."
    if differences.mean() > needed:
        return f"{text}: better by more than chance."
    return f"{text}: no difference shown ({100 * needed:.1f} points on average would be)."


def _variance(accuracy: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Variance of an accuracy; Laplace's rule keeps it above 0 at 0 and 100 %."""
    q = (accuracy * images + 1) / (images + 2)
    return q * (1 - q) / images

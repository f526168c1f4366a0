"""What `patchgen compare` prints: accuracy by unseen domain, other scores, masks, and a conclusion in sentences.

The rule of the verdict is that of `fit/expect.py`, with a level of 5 % shared by all comparisons. Runs record
accuracies, not single images, so the images count as unpaired, which is stricter.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from patchgen.fit.expect import LEVEL, reach
from patchgen.report.table import Column, Grid, Line, fill, unequal_terms
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import FACTS, METRICS, PARTS, SCORE, read_runs

CHECKPOINTS = {"selected": "selected checkpoint", "swad": "SWAD"}
RECOVERY = {"auroc": "AUROC", "untrained_auroc": "untrained", "iou": "IoU at 0.5", "untrained_iou": "untrained",
            "error": "mask error", "untrained_error": "untrained", "kept": "predictive kept",
            "untrained_kept": "untrained"}  # fmt: skip
MASKS = {"accuracy": "learned mask %", "mask: true mask": "true mask %", "mask: random mask": "random mask %"}
SPREADS = ("mean", "spread", "untrained_mean", "untrained_spread")
MOST_RIVALS = 5  # others that are compared with the best


def read_scores(runs: Iterable[tuple[RunFolder, str]]) -> pd.DataFrame:
    """The tidy scores of finished runs, each under its label; of several learning rates the best on validation."""
    labels = pd.DataFrame([(run.path, label) for run, label in runs], columns=["path", "method"])
    if labels.empty:
        return pd.DataFrame(columns=[*FACTS, *SCORE])
    scores, skipped = read_runs(labels["path"].unique())
    if skipped:
        raise ValueError(f"{skipped[0].path}: {skipped[0].reason}")
    scores = labels.merge(scores.drop(columns="method"), on="path")
    ranked = scores.sort_values("validation", ascending=False, kind="stable")
    best = ranked.drop_duplicates(["method", "unseen", "seed"])[["method", "run"]]
    return scores.merge(best, on=["method", "run"])


def cells(scores: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """One object per run, checkpoint and part, as JSON writes it."""
    for (*_, checkpoint), rows in scores.groupby(["method", "unseen", "seed", "run", "checkpoint"], sort=False):
        run: Any = next(rows.itertuples())  # a named tuple of the columns
        values: dict[Any, Any] = {part: of_part.set_index("metric")["value"].to_dict()
                                  for part, of_part in rows.groupby("part")}  # fmt: skip
        images = rows[rows["images"] > 0].groupby("part")["images"].first()
        masks = {name.removeprefix("mask: "): value for name, value in values["all"].items()
                 if name.startswith("mask: ")}  # fmt: skip
        replaced = {kind: masks.pop(f"{kind} mask") for kind in ("true", "random") if f"{kind} mask" in masks}
        for part in PARTS:
            numbers = values[part]
            yield {
                "method": run.method, "unseen": run.unseen, "seed": run.seed, "checkpoint": checkpoint,
                "part": part, "accuracy": numbers.get("accuracy", numbers.get("all")),
                "images": int(images[part]), "validation": run.validation,
                **{name: numbers.get(name) for name in ("f1", "known", "unknown")},
                "mask": masks, "given_mask": replaced if part == "all" else {}, "lr": run.lr,
                "select": run.selected_by, "run": run.run, "backbone": run.backbone,
                "metrics": {name: numbers[name] for name in METRICS if name in numbers},
            }  # fmt: skip


def comparison(
    scores: pd.DataFrame, methods: Sequence[str], domains: Sequence[str], seeds: int = 1, *,
    swad: bool = True, details: bool = False,
) -> str:  # fmt: skip
    """All tables, methods down; with `details` also SWAD, the 80 % part, source validation and other scores."""
    recorded, data = set(scores["metric"]), next(iter(scores["data"]), "")  # all runs are on one data set

    def table(columns: Sequence[Column], part: str = "all", names: Sequence[str] = methods) -> Grid:
        lines = [Line(method, fill(scores[scores["method"] == method], columns, part)) for method in names]
        return Grid("", "", "", tuple(columns), tuple(lines), asked_seeds=seeds)

    def accuracies(checkpoint: str, part: str) -> Grid:
        places = {**{domain: [domain] for domain in domains}, "average": domains}
        metrics = {"all": "all", "known": "known", "unknown": "unknown"} if "known" in recorded else {"accuracy": ""}
        return table([Column(word, {data: over}, metric, checkpoint, name) for name, over in places.items()
                      for metric, word in metrics.items()], part)  # fmt: skip

    main = accuracies("selected", "all")
    parts = [
        backbone_line(scores), f"Accuracy, selected checkpoint, on {PARTS['all']} (%)", main.markdown(),
        "\n".join(filter(None, [main.error_note(), *unequal_terms(methods)])),
        "\n".join(verdict(scores, methods, domains)),
    ]  # fmt: skip
    if details:
        for checkpoint, part in [("selected", "in"), *(("swad", part) for part in PARTS if swad)]:
            title = f"Accuracy, {CHECKPOINTS[checkpoint]}, on {PARTS[part]} (%)"
            parts += [title, accuracies(checkpoint, part).markdown()]
        columns = [Column(domain, {data: [domain]}, "validation") for domain in domains]
        columns += [
            Column(f"mask {kind}".replace("_", " "), {data: [domain]}, f"mask: {kind}", group=domain, scale=1, digits=2)
            for domain in domains for kind in SPREADS if f"mask: {kind}" in recorded
        ]  # fmt: skip
        parts.append("Source validation accuracy (%), by which checkpoints and learning rates are chosen, and masks")
        parts.append(table(columns).markdown())
        if columns := [Column(text, {data: domains}, name) for name, text in METRICS.items() if name in recorded]:
            parts.append("Other scores (%), selected checkpoint, mean over the whole unseen domains")
            parts.append(table(columns).markdown())
    known = scores[scores["metric"] == "mask: iou"]  # where the predictive patches are known
    if not known.empty:
        folds = {data: [domain for domain in domains if domain in set(known["unseen"])]}
        columns = [Column(text, folds, f"mask: {name}", scale=1, digits=2) for name, text in RECOVERY.items()
                   if text != "untrained" or f"mask: {name}" in recorded]  # fmt: skip
        columns += [Column(text, folds, metric) for metric, text in MASKS.items()]
        masked = table(columns, names=[method for method in methods if method in set(known["method"])])
        parts += ["Masks against the known predictive patches, on the unseen images", masked.markdown()]
    return "\n\n".join(filter(None, parts))


def backbone_line(scores: pd.DataFrame) -> str:
    """The backbones of the runs: `auto` may have resolved to different weights."""
    counts = scores.drop_duplicates("run")["backbone"].value_counts(sort=False)
    if len(counts) > 1:
        named = "; ".join(f"{name} ({count} runs)" for name, count in counts.items())
        return f"Backbones DIFFER, so the figures cannot be compared: {named}"
    return f"Backbone: {next(iter(counts.index), 'no run is finished yet')}"


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
    needed = reach(differences, (shares * (1 - shares) / images).sum(0), 1 - level) / len(differences) ** 0.5
    count = "one seed" if seeds == 1 else f"{seeds} seeds"
    text = f"Against {other}: {round(differences @ images)} of {images.sum():,} images apart, {count}"
    if math.isinf(needed):
        return f"{text}, one unseen domain: no difference can be shown for another."
    if differences.mean() > needed:
        return f"{text}: better by more than chance."
    return f"{text}: no difference shown ({100 * needed:.1f} points on average would be)."

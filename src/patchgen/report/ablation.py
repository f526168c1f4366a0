"""The paper's ablation (Table 8) and its sensitivity to loss weights and seeds (Table 10), from our runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from patchgen.config import Config
from patchgen.report.reference import find
from patchgen.report.table import Column, Grid, Line, fill
from patchgen.report.tables import NATURAL, by_setup, dataset_columns, folds_of, make_grid, training_command

ROWS = {  # row -> text, and the method; of PatchGen its lambda_ms, lambda_conf and lambda_sim
    "1.1": ("LP+LN (baseline B)", "lp-ln"), "1.2": ("B + GMDG", "gmdg"), "2.1": ("B + static mask", "ablation-static"),
    "2.2": ("B + channel mask", "ablation-channel"), "2.3": ("B + attention", "ablation-attention"),
    "2.4": ("B + attention + L_ms", "ablation-attention-ms"), "3.1": ("B + M_p", "patchgen-no-losses"),
    "3.2": ("B + M_p + 10 x L_ms", (1e-2, 0.0, 0.0)), "3.3": ("B + M_p + L_ms", (1e-3, 0.0, 0.0)),
    "3.4": ("B + M_p + L_ms + L_conf", (1e-3, 1.0, 0.0)),
    "3.5": ("B + M_p + L_ms + L_conf + L_sim (PatchGen)", (1e-3, 1.0, 1e-3)),
}  # fmt: skip
SWAD = {"selected": "without SWAD", "swad": "with SWAD"}
PAPER_COLUMNS = "Grey columns are the paper's, on {}: other data and another backbone, so compare orders, not levels."
BLOCKS = {"1": "baselines", "2": "other selectors", "3": "PatchGen's parts"}


def ablation_row(config: Config) -> str | None:
    """The ablation row of a run's settings, as we read the paper; None for all others."""
    if config.pool or config.tune or config.tau != Config.tau or config.refine != Config.refine:
        return None
    weights = config.lambda_ms, config.lambda_conf, config.lambda_sim
    key = weights if config.method == "patchgen" else config.method
    return next((row for row, (_, settings) in ROWS.items() if settings == key), None)


def ablation_grids(scores: pd.DataFrame, part: str) -> Iterator[Grid]:
    """Rows 1.1 to 3.5, data sets across, without and with SWAD; only if a row specific to the ablation was run."""
    for group in by_setup(scores[scores["task"] == "mdg"]):
        rows = group["config"].map(ablation_row)
        group = group.assign(row=rows).dropna(subset="row").sort_values("row", kind="stable")
        if set(group["row"]) <= {"1.1", "1.2", "3.1", "3.5"}:
            continue
        columns = [column for c, text in _checkpoints(group).items() for column in dataset_columns(group, c, text)]
        columns += [Column(f"paper, {name}", {}, checkpoint=c, group=text, key=(name, "average"), paper=True)
                    for c, text in SWAD.items()
                    for name in (*(d for d in folds_of(group) if d in NATURAL), "average")]  # fmt: skip
        small = group["data"].iloc[0].startswith("oracle-")
        recipe = "configs/small/ablation-small.yaml" if small else "configs/paper/ablation.yaml"
        lines = []
        for row, (text, _) in ROWS.items():
            of_row = group[group["row"] == row]
            command = training_command(of_row, group, recipe, columns)
            entries = fill(of_row, columns, part, command, find("ablation", setting=f"task={row}"))
            lines.append(Line(f"{row} {text}", entries, block=BLOCKS[row[0]]))
        grid = make_grid("ablation", "Ablation", group, columns, lines, part, reference="ablation", figure="ablation")
        yield replace(grid, first="row", notes=(*grid.notes, PAPER_COLUMNS.format("DINOv2 ViT-L/14")))


def _checkpoints(scores: pd.DataFrame) -> dict[str, str]:
    """The columns without SWAD, and those with it if any run has it."""
    recorded = set(scores["checkpoint"])
    return {checkpoint: text for checkpoint, text in SWAD.items() if checkpoint in recorded}


# Sensitivity to loss weights and seeds (Table 10)

Weights = tuple[float, float, float]  # lambda_ms, lambda_sim, tau
DEFAULT: Weights = (1e-3, 1e-3, 0.25)


def weights_of(config: Config) -> Weights | None:
    """The loss weights of a run of the whole method; None for others."""
    if config.method != "patchgen" or config.lambda_conf != 1.0 or not config.lambda_ms or not config.lambda_sim:
        return None
    if config.pool or config.tune or config.refine != Config.refine:
        return None
    return config.lambda_ms, config.lambda_sim, config.tau


def sensitivity_grids(scores: pd.DataFrame, part: str) -> Iterator[Grid]:
    """One line per setting of the loss weights, one per seed, and the choice of source validation."""
    mdg = scores[scores["task"] == "mdg"]
    for group in by_setup(mdg.assign(weights=mdg["config"].map(weights_of)).dropna(subset="weights")):
        if len(set(group["weights"])) > 1:
            yield _sensitivity_grid(group, part)


def _sensitivity_grid(scores: pd.DataFrame, part: str) -> Grid:
    by_weights: dict[Any, pd.DataFrame] = dict(iter(scores.groupby("weights")))
    columns = _fold_columns(scores)

    def line(label: str, block: str, of_line: pd.DataFrame, setting: str = "", recipe: str = "") -> Line:
        command = training_command(of_line, scores, recipe, columns) if recipe else lambda column: ""
        printed = [row for row in find("sensitivity") if row.setting == setting]
        return Line(label, fill(of_line, columns, part, command, printed), block=block)

    lines = []
    for block, settings in _blocks(sorted(by_weights, reverse=True)):
        for ms, sim, tau in settings:
            label = f"lambda_ms {ms:g}, lambda_sim {sim:g}" + (f", tau {tau:g}" if tau != DEFAULT[2] else "")
            setting = f"seed=1 lambda_ms={ms:g} lambda_sim={sim:g}" if tau == DEFAULT[2] else ""
            lines.append(line(label, block, by_weights[ms, sim, tau], setting, "sensitivity-small"))
    by_seed: dict[Any, pd.DataFrame] = dict(iter(by_weights[DEFAULT].groupby("seed"))) if DEFAULT in by_weights else {}
    for seed, of_seed in by_seed.items() if len(by_seed) > 1 else ():
        setting = f"seed={seed} lambda_ms=0.001 lambda_sim=0.001"
        lines.append(line(f"seed {seed}", "seeds, default weights", of_seed, setting))
    lines.append(line("chosen fold by fold", "chosen by source validation alone", scores))
    title, name = "Loss weights, threshold and seeds", "sensitivity"
    grid = make_grid(name, title, scores, columns, lines, part, reference=name, figure=name)
    return replace(grid, first="setting", notes=(*grid.notes, PAPER_COLUMNS.format("TerraIncognita")))


def _fold_columns(scores: pd.DataFrame) -> list[Column]:
    """Every fold, their average, and the paper's average over TerraIncognita."""
    columns = []
    for checkpoint, text in _checkpoints(scores).items():
        for dataset, domains in folds_of(scores).items():
            parts = [(dataset if dataset.startswith("oracle-") else f"{dataset}: {d}", [d]) for d in domains]
            parts += [(f"{dataset}: average", domains)] if len(domains) > 1 else []
            columns += [Column(heading, {dataset: over}, checkpoint=checkpoint, group=text) for heading, over in parts]
    key = ("TerraIncognita", "average")
    return [*columns, *(Column("paper", {}, checkpoint=c, group=SWAD[c], key=key, paper=True) for c in SWAD)]


def _blocks(settings: Sequence[Weights]) -> list[tuple[str, list[Weights]]]:
    """One weight varied with the others at their default, weight by weight; then all other combinations."""
    blocks, shown = [], set()
    for place, name in ((1, "lambda_sim"), (0, "lambda_ms"), (2, "tau")):
        others = [i for i in range(3) if i != place]
        varied = [s for s in settings if all(s[i] == DEFAULT[i] for i in others)]
        if len(varied) > 1:
            blocks.append((f"sensitivity to {name}", varied))
            shown |= set(varied)
    rest = [s for s in settings if s not in shown]
    return [*blocks, *([("other combinations", rest)] if rest else [])]

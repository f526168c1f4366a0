"""The paper's ablation (Table 8) and its sensitivity to loss weights and seeds (Table 10), from our runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from patchgen.config import Config
from patchgen.report.reference import Row, find, find_paper
from patchgen.report.table import Column, Entry, Grid, Line, fill
from patchgen.report.tables import NATURAL, by_setup, dataset_columns, folds_of, make_grid, training_command
from patchgen.runs.scores import Run

ROWS = {
    "1.1": "LP+LN (baseline B)",
    "1.2": "B + GMDG",
    "2.1": "B + static mask",
    "2.2": "B + channel mask",
    "2.3": "B + attention",
    "2.4": "B + attention + L_ms",
    "3.1": "B + M_p",
    "3.2": "B + M_p + 10 x L_ms",
    "3.3": "B + M_p + L_ms",
    "3.4": "B + M_p + L_ms + L_conf",
    "3.5": "B + M_p + L_ms + L_conf + L_sim (PatchGen)",
}
METHOD_ROWS = {
    "lp-ln": "1.1", "gmdg": "1.2", "ablation-static": "2.1", "ablation-channel": "2.2", "ablation-attention": "2.3",
    "ablation-attention-ms": "2.4", "patchgen-no-losses": "3.1",
}  # fmt: skip
WEIGHT_ROWS = {  # lambda_ms, lambda_conf, lambda_sim
    (1e-2, 0.0, 0.0): "3.2", (1e-3, 0.0, 0.0): "3.3", (1e-3, 1.0, 0.0): "3.4", (1e-3, 1.0, 1e-3): "3.5",
}  # fmt: skip
BLOCKS = {"1": "baselines", "2": "other selectors", "3": "PatchGen's parts"}
SWAD = {"selected": "without SWAD", "swad": "with SWAD"}


def ablation_row(config: Config) -> str | None:
    """The ablation row of a run's settings, as we read the paper; None for all others."""
    if config.pool or config.tune or config.tau != Config.tau or config.refine != Config.refine:
        return None
    if config.method == "patchgen":
        return WEIGHT_ROWS.get((config.lambda_ms, config.lambda_conf, config.lambda_sim))
    return METHOD_ROWS.get(config.method)


def ablation_grids(runs: Sequence[Run], part: str) -> list[Grid]:
    """Rows 1.1 to 3.5, data sets across, without and with SWAD; only if a row specific to the ablation was run."""
    grids = []
    for group in by_setup(run for run in runs if run.config.task == "mdg"):
        rows = {row: [run for run in group if _row(run) == row] for row in ROWS}
        if not any(rows[row] for row in ROWS if row not in ("1.1", "1.2", "3.1", "3.5")):
            continue
        used = [run for of_row in rows.values() for run in of_row]
        columns = _both_checkpoints(used)
        columns += [Column(f"paper, {name}", {}, checkpoint=c, group=SWAD[c], key=(name, "average"), paper=True)
                    for c in SWAD for name in (*(d for d in folds_of(used) if d in NATURAL), "average")]  # fmt: skip
        recipe = "configs/small/ablation-small.yaml" if "oracle-" in used[0].dataset else "configs/paper/ablation.yaml"
        lines = []
        for row, text in ROWS.items():
            entries = fill(rows[row], columns, part, training_command(rows[row], used, recipe, columns))
            printed = find("ablation", setting=f"task={row}")
            lines.append(Line(f"{row} {text}", _with_paper(entries, columns, printed), block=BLOCKS[row[0]]))
        grid = make_grid("ablation", "", "Ablation", used, columns, lines, part, "ablation", "ablation")
        grids.append(replace(grid, first="row", notes=(*grid.notes, PAPER_COLUMNS.format("DINOv2 ViT-L/14"))))
    return grids


PAPER_COLUMNS = "Grey columns are the paper's, on {}: other data and another backbone, so compare orders, not levels."


def _row(run: Run) -> str | None:
    return ablation_row(run.config) if run.config.task != "ccd" else None


def _both_checkpoints(runs: Sequence[Run]) -> list[Column]:
    """The data sets' columns without SWAD, and with it if any run has it."""
    checkpoints = {score.checkpoint for run in runs for score in run.scores}
    return [column for c in SWAD if c in checkpoints for column in dataset_columns(runs, c, SWAD[c])]


def _with_paper(entries: Sequence[Entry], columns: Sequence[Column], printed: Sequence[Row]) -> tuple[Entry, ...]:
    return tuple(
        Entry(paper=find_paper(printed, column)) if column.paper else entry
        for entry, column in zip(entries, columns, strict=True)
    )


# Sensitivity

Weights = tuple[float, float, float]  # lambda_ms, lambda_sim, tau
DEFAULT: Weights = (1e-3, 1e-3, 0.25)


def weights_of(run: Run) -> Weights | None:
    """The loss weights of a run of the whole method; None for others."""
    c = run.config
    if c.task != "mdg" or c.method != "patchgen" or c.lambda_conf != 1.0 or not c.lambda_ms or not c.lambda_sim:
        return None
    if c.pool or c.tune or c.refine != Config.refine:
        return None
    return c.lambda_ms, c.lambda_sim, c.tau


def sensitivity_grids(runs: Sequence[Run], part: str) -> list[Grid]:
    """One line per setting of the loss weights, one per seed, and the choice of source validation."""
    grids = []
    for group in by_setup(run for run in runs if weights_of(run)):
        settings = sorted({w for run in group if (w := weights_of(run))}, reverse=True)
        if len(settings) < 2:
            continue
        columns = _fold_columns(group)
        lines = [line for block in _blocks(settings) for line in _setting_lines(group, columns, part, *block)]
        lines += _seed_lines(group, columns, part)
        ours = [column for column in columns if not column.paper]
        chosen = fill(group, ours, part)
        lines.append(Line("chosen fold by fold", _pad(chosen, columns), block="chosen by source validation alone"))
        grid = make_grid("sensitivity", "", "Loss weights, threshold and seeds", group, columns, lines, part,
                         "sensitivity", "sensitivity")  # fmt: skip
        grids.append(replace(grid, first="setting", notes=(*grid.notes, PAPER_COLUMNS.format("TerraIncognita"))))
    return grids


def _pad(entries: Sequence[Entry], columns: Sequence[Column]) -> tuple[Entry, ...]:
    return (*entries, *(Entry() for _ in range(len(columns) - len(entries))))


def _fold_columns(runs: Sequence[Run]) -> list[Column]:
    """Every fold, their average, and the paper's average over TerraIncognita."""
    checkpoints = {score.checkpoint for run in runs for score in run.scores}
    columns = []
    for c in (c for c in SWAD if c in checkpoints):
        for dataset, domains in folds_of(runs).items():
            short = dataset if dataset.startswith("oracle-") else ""
            columns += [Column(short or f"{dataset}: {d}", {dataset: [d]}, checkpoint=c, group=SWAD[c])
                        for d in domains]  # fmt: skip
            if len(domains) > 1:
                columns.append(Column(f"{dataset}: average", {dataset: domains}, checkpoint=c, group=SWAD[c]))
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


def _setting_lines(
    runs: Sequence[Run], columns: Sequence[Column], part: str, block: str, settings: Sequence[Weights]
) -> list[Line]:
    lines = []
    for ms, sim, tau in settings:
        mine = [run for run in runs if weights_of(run) == (ms, sim, tau)]
        entries = fill(mine, columns, part, training_command(mine, runs, "sensitivity-small", columns))
        printed = _printed(f"seed=1 lambda_ms={ms:g} lambda_sim={sim:g}") if tau == DEFAULT[2] else []
        label = f"lambda_ms {ms:g}, lambda_sim {sim:g}" + (f", tau {tau:g}" if tau != DEFAULT[2] else "")
        lines.append(Line(label, _with_paper(entries, columns, printed), block=block))
    return lines


def _seed_lines(runs: Sequence[Run], columns: Sequence[Column], part: str) -> list[Line]:
    """The default weights, seed by seed, if there are several seeds."""
    usual = [run for run in runs if weights_of(run) == DEFAULT]
    seeds = sorted({run.config.seed for run in usual})
    lines = []
    for seed in seeds if len(seeds) > 1 else ():
        entries = fill([run for run in usual if run.config.seed == seed], columns, part)
        printed = _printed(f"seed={seed} lambda_ms=0.001 lambda_sim=0.001")
        lines.append(Line(f"seed {seed}", _with_paper(entries, columns, printed), block="seeds, default weights"))
    return lines


def _printed(setting: str) -> list[Row]:
    """The paper's line of a setting; empty if it has none."""
    return [row for row in find("sensitivity") if row.setting == setting]

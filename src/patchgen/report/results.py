"""Finished runs as rows of one small CSV file, which outlives the run folders, and tables made from it."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from patchgen.common.files import refuse_pipe, write_csv
from patchgen.common.text import csv_cell, markdown
from patchgen.config import Config
from patchgen.report.table import Column, Entry, Grid, Line, Number, fill, unequal_terms
from patchgen.runs.scores import backbone_name, read_runs

Row = dict[str, str]
SETTINGS = ("data", "unseen", "method", "backbone", "image_size", "steps", "lr", "lr_backbone", "lr_module", "hparams")
RECORDED = {  # column -> metric of the tidy scores, title of its table, heading where it shares one
    "accuracy": ("accuracy", "Accuracy on the whole unseen domain (%)", "accuracy (%)"),
    "swad": ("accuracy", "Accuracy of the SWAD average on the whole unseen domain (%)", "swad (%)"),
    "validation": ("validation", "Accuracy on source validation (%)", "validation (%)"),
    "auroc": ("mask: auroc", "AUROC of the mask against the predictive patches, unseen domain", "AUROC"),
    "iou": ("mask: iou", "IoU of {mask >= 0.5} and the predictive patches, unseen domain", "IoU"),
    "kept": ("mask: kept", "Share of the predictive patches with a mask of at least 0.5, unseen domain", "kept"),
    "iou_before": ("mask before level: iou", "The same IoU before the level is calibrated", "IoU before level"),
    "kept_before": ("mask before level: kept", "The same share before the level is calibrated", "kept before level"),
    "true_mask": ("mask: true mask", "Accuracy with the true mask in place of the learned one (%)", "true mask (%)"),
    "random_mask": ("mask: random mask", "Accuracy with a random mask of the true size in its place (%)",
                    "random mask (%)"),
    "known": ("known", "Accuracy on known classes (%)", "known (%)"),
    "unknown": ("unknown", "Accuracy on unknown classes (%)", "unknown (%)"),
    "known_by_name": ("by name: known", "Accuracy on known classes, by their own output (%)", "known by name (%)"),
    "unknown_by_name": ("by name: unknown", "Accuracy on unknown classes, by new outputs alone (%)",
                        "unknown by name (%)"),
    "taken_for_known": ("taken_for_known", "Share of unknown-class images that are given the output of a known class "
                        "(%)", "taken for known (%)"),
    "untrained_auroc": ("mask: untrained_auroc", "The same AUROC of the untrained mask", "AUROC, untrained"),
    "untrained_iou": ("mask: untrained_iou", "The same IoU of the untrained mask", "IoU, untrained"),
    "untrained_kept": ("mask: untrained_kept", "The same share of the untrained mask", "kept, untrained"),
}  # fmt: skip
SCORES = tuple(RECORDED)
COLUMNS = (*SETTINGS, "seed", *SCORES, "run")
SETUP = ("backbone", "image_size", "steps")  # the same for all rows of a data set in one table
RATES = ("lr", "lr_backbone", "lr_module", "hparams")


def collect(folders: Sequence[Path], file: Path) -> tuple[int, int]:
    """Add the finished runs below the folders to a CSV file; returns how many rows are new and how many there are."""
    stored = {row["run"]: row for row in read_rows(file)} if file.is_file() else {}
    rows = {row["run"]: row for row in _finished(folders)}
    every = _sorted((stored | rows).values())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_csv(file, COLUMNS, ([row[name] for name in COLUMNS] for row in every), people=True)
    return len(rows.keys() - stored.keys()), len(every)


def read_rows(file: Path) -> list[Row]:
    """The rows of such a file, or of the finished runs below a folder; scores that it has no column for are empty."""
    if file.is_dir():
        return _sorted(_finished([file]))
    refuse_pipe(file)
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        columns = set(reader.fieldnames or ())
        if not set(COLUMNS) - set(SCORES) <= columns <= set(COLUMNS):
            raise ValueError(f"{file} must have the columns {', '.join(COLUMNS)}; `patchgen runs collect` writes it")
        return [{name: row.get(name) or "" for name in COLUMNS} for row in reader]


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [row[name] for name in (*SETTINGS, "seed", "run")])


def _finished(folders: Sequence[Path]) -> Iterator[Row]:
    """The runs as the file will give them back."""
    weights = {field.name: field.default for field in fields(Config) if field.name.startswith("lambda_")}
    scores, _ = read_runs(folders)
    for _, of_run in scores[scores["task"] != "ccd"].groupby("path", sort=False):
        run: Any = next(of_run.itertuples())  # a named tuple of the columns
        config: Config = run.config
        whole = of_run[of_run["part"] == "all"]
        values = whole.set_index(["checkpoint", "metric"])["value"].to_dict()
        accuracy = "all" if run.task == "mdg_gcd" else "accuracy"
        score = {name: values.get(("selected", metric)) for name, (metric, *_) in RECORDED.items()}
        score |= {"accuracy": values.get(("selected", accuracy)), "swad": values.get(("swad", accuracy))}
        changed = {name: getattr(config, name) for name in weights if getattr(config, name) != weights[name]}
        row = {name: "" if value is None else f"{value:.5f}" for name, value in score.items()}
        for name in ("image_size", "steps", "lr", "lr_backbone", "lr_module", "seed"):
            row[name] = "" if getattr(config, name) is None else f"{getattr(config, name):g}"
        row |= {
            "data": run.data, "unseen": config.unseen, "method": run.method, "backbone": backbone_name(run.backbone),
            "hparams": " ".join(f"{name}={value:g}" for name, value in sorted((config.hparams | changed).items())),
            "run": run.run,
        }  # fmt: skip
        yield {name: csv_cell(row[name]) for name in COLUMNS}


def tables(rows: Sequence[Row], scores: Sequence[str] = ("accuracy",), against: Sequence[str] = ()) -> str:
    """A Markdown table per score, and differences to `against`, paired over equal data, fold and seed."""
    wide = pd.DataFrame(rows).assign(method=[_label(row, rows) for row in rows])
    for data, of_data in wide.groupby("data", sort=False):
        for name in SETUP:
            if len(values := sorted(of_data[name].unique())) > 1:
                several = f"several values of {name}, {', '.join(values)}"
                raise ValueError(f"rows of {data} have {several}; choose with --only")
    # as in `runs/scores.py`, one line per number
    long = wide.melt([*SETTINGS, "seed", "run"], SCORES, "metric", "value", ignore_index=False)
    numbers = long[long["value"] != ""].astype({"value": float}).sort_index(kind="stable")
    numbers = numbers.assign(checkpoint="selected", part="all", validation=0.0, selected_by="", images=0)
    names = dict.fromkeys(name for score in scores for name in (score, f"untrained_{score}"))
    shown = [name for name in names if name in scores or name in set(numbers["metric"])]
    folds = wide[["data", "unseen"]].drop_duplicates().to_numpy().tolist()
    if len(folds) == 1 and len(shown) > 1:
        [(data, unseen)] = folds
        grids = [_grid(f"{data}, unseen: {unseen}", numbers, [_column(score, {data: [unseen]}) for score in shown])]
    else:
        present = set(numbers["metric"])
        grids = [_fold_grid(numbers[numbers["metric"] == score], score) for score in shown if score in present]
    parts = [f"{grid.title}\n\n{grid.markdown()}" for grid in grids]
    notes = [*(grid.error_note() for grid in grids[:1]), *unequal_terms(numbers["method"].unique())]
    parts += ["\n".join(filter(None, notes)), *(_paired(numbers, base) for base in against)]
    return "\n\n".join(filter(None, parts))


def _label(row: Row, rows: Iterable[Row]) -> str:
    """The method, with the rates and hyper-parameters in which rows of that method differ."""
    same = [other for other in rows if other["method"] == row["method"]]
    differ = [name for name in RATES if row[name] and len({other[name] for other in same}) > 1]
    return ", ".join([row["method"], *(row[n] if n == "hparams" else f"{n} {row[n]}" for n in differ)])


def _column(score: str, folds: dict[str, list[str]], heading: str = "") -> Column:
    _, title, short = RECORDED[score]
    percent = title.endswith("(%)")
    return Column(heading or short, folds, score, scale=100 if percent else 1, digits=1 if percent else 2)


def _fold_grid(numbers: pd.DataFrame, score: str) -> Grid:
    """Methods down, data sets and folds across, and the mean over the folds."""
    folds: dict[str, list[str]] = {str(data): list(of_data["unseen"].unique())
                                   for data, of_data in numbers.groupby("data", sort=False)}  # fmt: skip
    columns = [_column(score, {data: [unseen]}, f"{data}: {unseen}" if len(domains) > 1 else data)
               for data, domains in folds.items() for unseen in domains]  # fmt: skip
    if len(columns) > 1:
        columns.append(replace(_column(score, folds, "mean"), over="folds"))
    return _grid(RECORDED[score][1], numbers, columns)


def _grid(title: str, numbers: pd.DataFrame, columns: Sequence[Column]) -> Grid:
    """A line per method, with the number of its seeds in the last column."""
    lines = []
    for method, of_method in numbers.groupby("method", sort=False):
        entries = fill(of_method.assign(seed=of_method.index), columns, "all")
        lines.append(Line(str(method), (*entries, Entry(text=str(of_method["seed"].nunique())))))
    return Grid("", title, "", (*columns, Column("seeds", {})), tuple(lines), asked_seeds=1)


def _paired(numbers: pd.DataFrame, base: str) -> str:
    """Mean differences of accuracy to one method, or to its sum with the same terms, over equal data, fold and seed."""
    accuracies = numbers[numbers["metric"] == "accuracy"].set_index(["data", "unseen", "seed"])
    values = {str(method): 100 * rows["value"] for method, rows in accuracies.groupby("method", sort=False)}
    if base not in values:
        raise ValueError(f"no row is called {base!r}; there are {', '.join(values)}")
    lines = []
    for method, accuracy in values.items():
        equal = "+".join([base, *method.partition(",")[0].split("+")[1:]])
        reference = equal if equal in values and "+" not in base and equal != method else base
        pairs = (accuracy - values[reference]).dropna()
        if method != base and len(pairs):
            number = Number(pairs.to_dict(), over="folds x seeds")
            label = method if reference == base else f"{method} (minus {reference})"
            lines.append([label, number.text(), str(len(pairs)), str((pairs > 0).sum())])
    head = ["method", f"minus {base}", "pairs", "better in"]
    title = f"Difference to {base}, paired over data, fold and seed (points); ± is the standard error over the pairs"
    return f"{title}\n\n{markdown(head, lines)}"

"""Runs as rows of one small CSV file, which outlives the run folders, and tables made from it.

    collect([Path("runs")], Path("docs/results/data/selection.csv"))      # adds new runs, replaces existing ones
    print(tables(read_rows(path), against="lp-ln"))                       # Markdown: mean ± standard error over seeds

A row is a finished run: data, unseen domain, method, seed, the settings that tables compare, scores, and the run's
name, which is the hash of all its settings.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from patchgen.common.csv_files import write_csv
from patchgen.common.files import refuse_pipe
from patchgen.common.text import csv_cell
from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import label_of, paper_backbone, read_runs, score_record

Row = dict[str, str]
SETTINGS = ("data", "unseen", "method", "backbone", "image_size", "steps", "lr", "lr_backbone", "lr_module", "hparams")
SCORES = (
    "accuracy", "swad", "validation", "auroc", "iou", "kept", "iou_before", "kept_before", "true_mask", "random_mask",
    "known", "unknown", "known_by_name", "unknown_by_name", "taken_for_known",
)  # fmt: skip
COLUMNS = (*SETTINGS, "seed", *SCORES, "run")
SETUP = ("backbone", "image_size", "steps")  # the same for all rows of a data set in one table
RATES = ("lr", "lr_backbone", "lr_module", "hparams")
HEADINGS = {
    "accuracy": "Accuracy on the whole unseen domain (%)",
    "swad": "Accuracy of the SWAD average on the whole unseen domain (%)",
    "validation": "Accuracy on source validation (%)",
    "auroc": "AUROC of the mask against the predictive patches, unseen domain",
    "iou": "IoU of {mask >= 0.5} and the predictive patches, unseen domain",
    "kept": "Share of the predictive patches with a mask of at least 0.5, unseen domain",
    "iou_before": "The same IoU before the level is calibrated",
    "kept_before": "The same share before the level is calibrated",
    "true_mask": "Accuracy with the true mask in place of the learned one (%)",
    "random_mask": "Accuracy with a random mask of the true size in its place (%)",
    "known": "Accuracy on known classes (%)",
    "unknown": "Accuracy on unknown classes (%)",
    "known_by_name": "Accuracy on known classes, by their own output (%)",
    "unknown_by_name": "Accuracy on unknown classes, by new outputs alone (%)",
    "taken_for_known": "Share of unknown-class images that are given the output of a known class (%)",
}
SHORT = {"auroc": "AUROC", "iou": "IoU", "iou_before": "IoU before level", "kept_before": "kept before level",
         "true_mask": "true mask", "random_mask": "random mask", "known_by_name": "known by name",
         "unknown_by_name": "unknown by name", "taken_for_known": "taken for known"}  # fmt: skip
PERCENT = {"accuracy", "swad", "validation", "true_mask", "random_mask", *SCORES[SCORES.index("known") :]}


def collect(folders: Sequence[Path], file: Path) -> tuple[int, int]:
    """Add the finished runs below the folders to a CSV file; returns how many rows are new and how many there are."""
    kept = {row["run"]: row for row in read_rows(file)} if file.is_file() else {}
    runs, _ = read_runs(folders)
    rows = {row["run"]: row for row in (_row(run) for run in runs if run.config.task != "ccd")}
    new = len(rows.keys() - kept.keys())
    every = sorted((kept | rows).values(), key=lambda row: [row[name] for name in (*SETTINGS, "seed", "run")])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_csv(file, COLUMNS, ([row[name] for name in COLUMNS] for row in every), people=True)
    return new, len(every)


def read_rows(file: Path) -> list[Row]:
    """The rows of such a file; scores that it has no column for are empty.

    Raises:
        ValueError: it has other columns.
    """
    refuse_pipe(file)
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        columns = set(reader.fieldnames or ())
        if not set(COLUMNS) - set(SCORES) <= columns <= set(COLUMNS):
            raise ValueError(f"{file} must have the columns {', '.join(COLUMNS)}; `patchgen runs collect` writes it")
        return [{name: row.get(name) or "" for name in COLUMNS} for row in reader]


def tables(rows: Sequence[Row], scores: Sequence[str] = ("accuracy",), against: Sequence[str] = ()) -> str:
    """Markdown tables, one for each score: methods down, data sets and folds across; of one fold, scores across.

    Args:
        rows: Of one CSV file, or some of them.
        scores: Columns to show.
        against: Methods whose paired differences, over equal data, fold and seed, are added below the accuracies.

    Raises:
        ValueError: rows of one data set have several backbones, image sizes or numbers of steps.
    """
    for data in dict.fromkeys(row["data"] for row in rows):
        for name in SETUP:
            values = sorted({row[name] for row in rows if row["data"] == data})
            if len(values) > 1:
                raise ValueError(
                    f"rows of {data} have several values of {name}, {', '.join(values)}; choose with --only"
                )
    one = len({(row["data"], row["unseen"]) for row in rows}) == 1
    parts = [_side_by_side(rows, scores)] if one and len(scores) > 1 else [_table(rows, score) for score in scores]
    parts += [_paired(rows, base) for base in against]
    return "\n\n".join(part for part in parts if part)


def mean_and_error(values: Sequence[float], score: str = "accuracy") -> str:
    """`91.2 ± 0.4`: mean and standard error; only the mean for a single value, and nothing for none."""
    digits = 1 if score in PERCENT else 2
    mean = f"{statistics.mean(values):.{digits}f}" if values else ""
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else mean


def _row(run: Any) -> Row:
    config: Config = run.config
    test = score_record(RunFolder(run.path))
    named = {(s.checkpoint, s.metric, s.part): s.value for s in run.scores}
    accuracy = "all" if config.task == "mdg_gcd" else "accuracy"
    score = {
        "accuracy": named.get(("selected", accuracy, "all")),
        "swad": named.get(("swad", accuracy, "all")),
        "validation": run.validation,
        **{name: test.get("mask", {}).get(name) for name in ("auroc", "iou", "kept")},
        **{f"{name}_before": test.get("mask_before_level", {}).get(name) for name in ("iou", "kept")},
        **{name: test.get(name, {}).get("accuracy") for name in ("true_mask", "random_mask")},
        **{name: test["all"].get(name) for name in ("known", "unknown", "taken_for_known")},
        **{f"{name}_by_name": test.get("by_name", {}).get(name) for name in ("known", "unknown")},
    }
    settings = {
        "data": run.dataset,
        "unseen": config.unseen,
        "method": label_of(config),
        "backbone": " ".join(filter(None, paper_backbone(run.backbone))) or run.backbone,
        "hparams": " ".join(f"{name}={value:g}" for name, value in sorted((config.hparams | _lambdas(config)).items())),
    }
    plain = {name: getattr(config, name) for name in ("image_size", "steps", "lr", "lr_backbone", "lr_module", "seed")}
    texts = {name: "" if value is None else f"{value:g}" for name, value in plain.items()}
    numbers = {name: "" if value is None else f"{value:.5f}" for name, value in score.items()}
    cells = settings | texts | numbers | {"run": run.path.name}
    return {name: csv_cell(cell) for name, cell in cells.items()}  # as the file will give them back


def _lambdas(config: Config) -> dict[str, float]:
    """The weights of PatchGen's losses that are not the default."""
    weights = {field.name: field.default for field in fields(Config) if field.name.startswith("lambda_")}
    return {name: getattr(config, name) for name, default in weights.items() if getattr(config, name) != default}


def _table(rows: Sequence[Row], score: str) -> str:
    known = [row for row in rows if row[score]]
    if not known:
        return ""
    columns = list(dict.fromkeys((row["data"], row["unseen"]) for row in known))
    labels = list(dict.fromkeys(_label(row, known) for row in known))
    several = {data: sum(column[0] == data for column in columns) > 1 for data, _ in columns}
    heads = [f"{data}: {unseen}" if several[data] else data for data, unseen in columns]
    lines = [["method", *heads, *(["mean"] if len(columns) > 1 else []), "seeds"]]
    for label in labels:
        own = [row for row in known if _label(row, known) == label]
        cells = [[_value(row, score) for row in own if (row["data"], row["unseen"]) == column] for column in columns]
        shown = [mean_and_error(cell, score) for cell in cells]
        whole = [mean_and_error([statistics.mean(cell) for cell in cells], score) if all(cells) else ""]
        lines.append([label, *shown, *(whole if len(columns) > 1 else []), str(len({row["seed"] for row in own}))])
    return f"{HEADINGS[score]}\n\n" + _markdown(lines)


def _side_by_side(rows: Sequence[Row], scores: Sequence[str]) -> str:
    """One table of several scores, for runs that share data and fold."""
    heads = [f"{SHORT.get(score, score)}{' (%)' if score in PERCENT else ''}" for score in scores]
    lines = [["method", *heads, "seeds"]]
    for label in dict.fromkeys(_label(row, rows) for row in rows):
        own = [row for row in rows if _label(row, rows) == label]
        cells = [mean_and_error([_value(row, score) for row in own if row[score]], score) for score in scores]
        lines.append([label, *cells, str(len({row["seed"] for row in own}))])
    return f"{rows[0]['data']}, unseen: {rows[0]['unseen']}\n\n" + _markdown(lines)


def _paired(rows: Sequence[Row], base: str) -> str:
    """Mean differences of accuracy to one method, over runs with equal data, fold and seed."""
    labels = list(dict.fromkeys(_label(row, rows) for row in rows))
    if base not in labels:
        raise ValueError(f"no row is called {base!r}; there are {', '.join(labels)}")

    def of(label: str) -> dict[tuple[str, ...], float]:
        own = [row for row in rows if row["accuracy"] and _label(row, rows) == label]
        return {(row["data"], row["unseen"], row["seed"]): _value(row, "accuracy") for row in own}

    reference, lines = of(base), [["method", f"minus {base}", "pairs", "better in"]]
    for label in labels:
        pairs = [value - reference[key] for key, value in of(label).items() if key in reference]
        if label != base and pairs:
            lines.append([label, mean_and_error(pairs), str(len(pairs)), str(sum(pair > 0 for pair in pairs))])
    return f"Difference to {base}, paired over data, fold and seed (points)\n\n" + _markdown(lines)


def _label(row: Row, rows: Iterable[Row]) -> str:
    """The method, with the rates and hyper-parameters in which rows of that method differ."""
    same = [other for other in rows if other["method"] == row["method"]]
    differ = [name for name in RATES if row[name] and len({other[name] for other in same}) > 1]
    return ", ".join([row["method"], *(row[n] if n == "hparams" else f"{n} {row[n]}" for n in differ)])


def _value(row: Row, score: str) -> float:
    return float(row[score]) * (100 if score in PERCENT else 1)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *body])

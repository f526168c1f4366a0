"""Predictions of a model for the labelled images of a folder or manifest, and the images that could not be scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import read_csv
from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import read_json
from patchgen.data.table import Table
from patchgen.predict.predictor import Predictor, Unreadable
from patchgen.runs.folder import MODEL_CONFIG, RunFolder, is_model_folder

UNKNOWN = -1  # label of an image whose class the model does not have


@dataclass(frozen=True, eq=False)
class Answers:
    """One row per image that was read; images without a label are not predicted."""

    table: Table
    classes: tuple[str, ...]  # the model's
    rows: np.ndarray  # (N,) rows of the table
    label: np.ndarray  # (N,) into classes, or UNKNOWN
    probabilities: np.ndarray  # (N, C) float32
    unlike: np.ndarray | None  # (N,) bool: unlike the training images; None if the model does not support it
    unlabelled: int
    unreadable: tuple[Unreadable, ...]

    @cached_property
    def predicted(self) -> np.ndarray:
        return self.probabilities.argmax(1)

    @cached_property
    def confidence(self) -> np.ndarray:
        """(N,) the probability of the predicted class."""
        return self.probabilities.max(1).astype(float)

    @cached_property
    def right(self) -> np.ndarray:
        """(N,) bool; False for classes that the model does not have."""
        return self.predicted == self.label

    def take(self, keep: np.ndarray) -> "Answers":
        """The answers for some images, given as (N,) bool."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in ("rows", "label", "probabilities", "unlike")}
        columns = {name: None if values is None else values[keep] for name, values in columns.items()}
        return replace(self, **columns)

    def known(self) -> "Answers":
        """The answers for classes that the model has."""
        return self.take(self.label != UNKNOWN)


def rows_of_sites(table: Table, sites: Sequence[str] = ()) -> np.ndarray:
    """Rows of the named sites, in table order; all rows if no site is named."""
    if not sites:
        return np.arange(len(table))
    return np.sort(np.concatenate([table.rows_of(site) for site in dict.fromkeys(sites)]))


def check_classes(table: Table, rows: np.ndarray, classes: Sequence[str]) -> None:
    """Raise ValueError if nothing can be scored, before any image is read."""
    named = [table.classes[i] for i in np.unique(table.label[rows]) if i >= 0]
    if not named:
        raise ValueError(f"none of the {len(rows):,} images has a label; `patchgen predict` needs none")
    if not set(named) & set(classes):
        # no image is directly in its class folder: sites may have been mistaken for classes
        deep = table.root.is_dir() and all(len(Path(path).parts) > 3 for path in table.paths)
        higher = f"; if these are sites, give the folder that contains them, not '{table.root}'" if deep else ""
        few = [", ".join(n[:10]) + (f" and {len(n) - 10} more" if len(n) > 10 else "") for n in (named, classes)]
        hint = f"{did_you_mean(named[0], classes)}{higher}"
        raise ValueError(f"the model knows none of the data's classes ({few[0]}); its own are {few[1]}{hint}")


def collect(
    predictor: Predictor, table: Table, rows: np.ndarray, batch: int = 64, tick: Callable[[int], None] | None = None
) -> Answers:
    """Predict the labelled rows of a table; only the probabilities of each image are stored."""
    classes = tuple(predictor.classes)
    if predictor.config.task != "mdg":
        raise ValueError(f"a run of task {predictor.config.task} has outputs for new classes, which have no names; its "
                         "summary.md scores them after matching")  # fmt: skip
    check_classes(table, rows, classes)
    labelled = rows[table.label[rows] >= 0]
    number = {name: i for i, name in enumerate(classes)}
    read, label, unlike, probabilities, unreadable = [], [], [], [], []
    predictions = predictor.predict((table.file(int(row)) for row in labelled), batch, tick)
    for row, answer in zip(labelled.tolist(), predictions, strict=True):
        if isinstance(answer, Unreadable):
            unreadable.append(answer)
            continue
        read.append(row)
        label.append(number.get(table.label_name(row), UNKNOWN))
        unlike.append(answer.unlike_training)
        probabilities.append(answer.probabilities)
    if not read:
        raise ValueError(f"none of the {len(labelled):,} labelled images can be read ({unreadable[0].path}: "
                         f"{unreadable[0].reason}); `patchgen doctor` lists what is wrong")  # fmt: skip
    if {*label} == {UNKNOWN}:
        raise ValueError(f"all {len(read):,} images that can be read are of classes that the model does not know")
    columns = np.array(read), np.array(label), np.stack(probabilities), None if None in unlike else np.array(unlike)
    return Answers(table, classes, *columns, len(rows) - len(labelled), tuple(unreadable))


def training_sites(model: str | Path) -> tuple[list[str], dict[str, Any] | None]:
    """The sites that a model or run folder was trained on, and what `fit` expected at a new site; None if unknown."""
    if is_model_folder(model):
        facts = read_json(Path(model) / MODEL_CONFIG)
        data = facts.get("data") or {}
        return sorted(set(data.get("sites", ())) - {data.get("unseen")}), facts.get("expected")
    folder = RunFolder.open(model)
    splits = folder.path / "splits.csv"
    rows = read_csv(splits)[1] if splits.is_file() else []
    return sorted({row["domain"] for _, row in rows} - {folder.config.unseen}), None

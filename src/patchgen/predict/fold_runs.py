"""Finished runs of one fold on the same data: opened together for a diagnosis, and scored as an ensemble.

An ensemble is the mean of the runs' probabilities on the unseen domain; for `+sma` runs this is EoA (Arpit et al.,
NeurIPS 2022). Its 80 % part is that of the first run's split.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.common.files import expanded
from patchgen.common.progress import Progress
from patchgen.data.images import ImageStore
from patchgen.data.oracle import true_masks
from patchgen.data.splits import read_splits
from patchgen.data.table import fingerprint, read_table
from patchgen.methods import method_class
from patchgen.model.classifier import Classifier
from patchgen.predict.predictor import Checkpoint, Predictor, load_run
from patchgen.runs.folder import RunFolder, run_name
from patchgen.runs.tensors import Predictions, read_predictions, save_predictions
from patchgen.tasks import Fold, make_fold
from patchgen.tasks.metrics import probability_scores


@dataclass(frozen=True)
class Subject:
    """One run under examination."""

    name: str
    folder: RunFolder
    predictor: Predictor
    fold: Fold
    store: ImageStore

    @property
    def model(self) -> Classifier:
        return self.predictor.model

    @property
    def patches(self) -> int:
        return self.model.grid[0] * self.model.grid[1]

    @cached_property
    def truth(self) -> np.ndarray | None:
        """(N,P) bool: C* of every row, None if it is not known."""
        return true_masks(self.fold.table, self.model.grid)

    def pixels(self, rows: np.ndarray) -> Tensor:
        """(B,3,S,S) in [0,1]."""
        return self.store.load(rows).to(self.predictor.device).float() / 255

    @torch.no_grad()
    def probabilities(self, pixels: Tensor) -> Tensor:
        return self.model(self.model.backbone.normalised(pixels)).logits.float().softmax(1)


def open_subjects(
    runs: Sequence[str], data: str | None, checkpoint: Checkpoint = "selected", **device: Any
) -> list[Subject]:
    """The runs in the given order, all of one fold; `data`: the current path of their data, if it has changed."""
    if len({Path(run).resolve() for run in runs}) < len(runs):
        raise ValueError("the same run is named twice; leave it out of --against")
    folders, fold = open_runs(runs, data)
    names = [f"{f.config.method}@{f.config.pool}" if f.config.pool else f.config.method for f in folders]
    subjects = []
    for folder, name in zip(folders, names, strict=True):
        predictor = load_run(folder.path, checkpoint, **device)
        full_name = name if names.count(name) == 1 else f"{name} {folder.path.resolve().name[:6]}"
        subjects.append(Subject(full_name, folder, predictor, fold, predictor.store(fold.table.files)))
    return subjects


def open_runs(runs: Sequence[str | Path], data: str | None) -> tuple[list[RunFolder], Fold]:
    """Finished runs of one fold on the same data, and the fold."""
    folders = [RunFolder.open(run) for run in runs]
    for folder in folders:
        if not folder.done:
            raise ValueError(f"{folder.path} is not finished; the same `patchgen train` command resumes it")
        folder.require_plugins()
        if method_class(folder.config.method).mask == "true":
            raise ValueError(f"{folder.path}: method {folder.config.method!r} uses the true mask; leave it out")
    first = folders[0].config
    fold = make_fold(replace(first, data=data) if data else first)
    for folder in folders:
        if folder.config.unseen != first.unseen:
            raise ValueError(f"{folder.path} left out {folder.config.unseen!r}, but {folders[0].path} left out "
                             f"{first.unseen!r}; only runs of one fold can be compared or averaged")  # fmt: skip
        _check_data(folder, fold, data)
    return folders, fold


def _check_data(folder: RunFolder, fold: Fold, data: str | None) -> None:
    """Check that the images are those of the run, by its list of images and, if known, by their sizes."""
    config = folder.config
    try:
        read_splits(folder.path / "splits.csv", fold.table)
        same = folder.path.resolve().name == run_name(config, fingerprint(fold.table))
        if not same and (not data or expanded(config.data).exists()):
            there = read_table(config.data, benchmark=config.benchmark, options=config.options)
            if there.root != fold.table.root and fingerprint(there) != fingerprint(fold.table):
                raise ValueError(f"the images at {there.root} have the same names, but other contents")
    except ValueError as error:
        raise ValueError(f"{folder.path} was not trained on the data at {fold.table.root} ({error}); use runs on the "
                         "same data, and give --data if its path has changed") from error  # fmt: skip


def unseen_rows(fold: Fold, count: int, seed: int) -> np.ndarray:
    """At most `count` rows of the unseen domain whose class has an output, evenly over the classes."""
    if not fold.test:
        raise ValueError("the run was trained on all domains (--unseen none): it has no unseen image to diagnose with")
    rows = np.concatenate([fold.test["in"], fold.test["out"]])
    rows = rows[(fold.truth[rows] >= 0) & (fold.truth[rows] < min(fold.num_known, len(fold.classes)))]
    if not len(rows):
        raise ValueError(f"the unseen domain {fold.unseen!r} has no labelled image of a known class to diagnose with")
    return _evenly(rows, fold.truth[rows], count, seed)


def geometry_rows(fold: Fold, count: int, seed: int) -> np.ndarray:
    """At most `count` rows of each domain, none of which was trained on."""
    parts = [_evenly(rows, fold.truth[rows], count, seed) for rows in fold.validation.values()]
    return np.concatenate([*parts, unseen_rows(fold, count, seed)])


def _evenly(rows: np.ndarray, label: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` of the rows, drawn by the seed, from each class in turn."""
    import pandas as pd

    shuffled = pd.Series(label).iloc[np.random.default_rng(seed).permutation(len(rows))]
    turn = shuffled.groupby(shuffled).cumcount()  # how many of its class come before it
    return rows[turn.sort_values(kind="stable").index[:count]]


# Predictions for the unseen domain


def predictions_at(run: RunFolder, fold: Fold, checkpoint: Checkpoint, **device: Any) -> Predictions:
    """What a run predicts for the unseen domain, as saved; a run of an earlier version predicts and saves it now."""
    rows = rows_of(fold)
    saved = read_predictions(run.path, checkpoint)
    fits = saved is not None and saved.probabilities.shape == (len(rows), len(fold.classes))
    if saved and fits and (saved.rows == rows).all() and (saved.label == fold.truth[rows]).all():
        return saved
    predictor = load_run(run.path, checkpoint, **device)
    with Progress(f"predicting {fold.unseen}", len(rows)) as bar:
        logits, *_ = predictor.read(predictor.store(fold.table.files), rows, bar.tick)
    predictions = Predictions(rows, fold.truth[rows], logits.softmax(1).float().numpy())
    with suppress(OSError):  # a folder that is not ours to write to
        save_predictions(run.path, checkpoint, predictions, fold.classes)
    return predictions


def rows_of(fold: Fold) -> np.ndarray:
    """The rows of the unseen domain, in the order of the table."""
    return np.sort(np.concatenate(list(fold.test.values())))


@dataclass(frozen=True)
class Scored:
    name: str  # the method
    run: str  # name of the run folder
    part: dict[str, Any]  # scores of the 80 % part: accuracy, f1, auroc, images, per_class, ...
    whole: dict[str, Any]  # the same of all images


@dataclass(frozen=True)
class Ensemble:
    fold: Fold
    rows: np.ndarray  # (N,) scored rows of the table
    probabilities: np.ndarray  # (N, C) mean over the runs
    members: tuple[Scored, ...]
    part: dict[str, Any]
    whole: dict[str, Any]

    @property
    def gain(self) -> float:
        """Accuracy on the whole domain minus the mean accuracy of the single runs."""
        return float(self.whole["accuracy"] - np.mean([member.whole["accuracy"] for member in self.members]))


def score_ensemble(
    runs: Sequence[str | Path], data: str | None = None, checkpoint: Checkpoint = "selected", **device: Any
) -> Ensemble:
    """Score the mean of the probabilities of two or more finished runs; `data` as in `open_subjects`."""
    if len({Path(run).resolve() for run in runs}) < max(len(runs), 2):
        raise ValueError(f"an ensemble needs at least two different runs, got {', '.join(map(str, runs)) or 'none'}")
    folders, fold = open_runs(runs, data)
    if other := next((folder for folder in folders if folder.config.task != "mdg"), None):
        raise ValueError(f"{other.path} is a run of task {other.config.task}, whose outputs for new classes mean "
                         "something else in every run; an ensemble needs runs of task mdg")  # fmt: skip
    if not fold.test:
        raise ValueError(f"{folders[0].path} was trained on all domains (--unseen none): it has no unseen domain")
    each = [predictions_at(run, fold, checkpoint, **device).probabilities.astype(float) for run in folders]
    members = tuple(
        Scored(run.config.method, run.path.resolve().name, *_score(probabilities, fold))
        for run, probabilities in zip(folders, each, strict=True)
    )
    mean = np.mean(each, axis=0)
    return Ensemble(fold, rows_of(fold), mean, members, *_score(mean, fold))


def _score(probabilities: np.ndarray, fold: Fold) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of the 80 % part and of the whole, as a run's own test record has them."""
    rows = rows_of(fold)
    truth, inside = fold.truth[rows], np.isin(rows, fold.test["in"])
    confusion = np.zeros((2, fold.size, fold.size), dtype=np.int64)  # [the rest, the 80 % part]
    np.add.at(confusion, (inside.astype(int), truth, probabilities.argmax(1)), 1)
    part = fold.scores(confusion[1]) | probability_scores(truth[inside], probabilities[inside])
    return part, fold.scores(confusion.sum(0)) | probability_scores(truth, probabilities)

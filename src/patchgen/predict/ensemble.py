"""Ensemble of runs: the mean of their probabilities, scored on the unseen domain that all of them left out.

    found = score_ensemble(["runs/4f2a9c01b7de", "runs/90be2f11c3aa"])
    found.whole["accuracy"], [member.whole["accuracy"] for member in found.members]

For runs trained with `+sma` this is EoA, the ensemble of averages (Arpit et al., NeurIPS 2022). Runs may differ in
method, backbone, image size and seed, but not in data, classes and unseen domain. The 80 % part is that of the first
run's split, for all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.reading import batches
from patchgen.predict.predictor import Checkpoint, load_run
from patchgen.predict.subjects import Subject, check_classes, open_runs
from patchgen.runs.folder import RunFolder
from patchgen.tasks import Fold
from patchgen.tasks.metrics import probability_scores

BATCH = 128  # as in a run's own test: predictions of transductive methods depend on it


@dataclass(frozen=True)
class Scored:
    """The scores of a run, or of the ensemble, on the unseen domain."""

    name: str  # the method
    run: str  # name of the run folder
    part: dict[str, Any]  # scores of the 80 % part: accuracy, f1, auroc, images, per_class, ...
    whole: dict[str, Any]  # the same of all images


@dataclass(frozen=True)
class Ensemble:
    fold: Fold
    rows: np.ndarray  # (N,) scored rows of the table: the 80 % part, then the rest
    probabilities: np.ndarray  # (N, C) mean over the runs
    members: tuple[Scored, ...]
    part: dict[str, Any]
    whole: dict[str, Any]

    @property
    def gain(self) -> float:
        """Accuracy on the whole domain minus the mean accuracy of the single runs."""
        return float(self.whole["accuracy"] - np.mean([member.whole["accuracy"] for member in self.members]))


def score_ensemble(
    runs: Sequence[str | Path], data: str | None = None, checkpoint: Checkpoint = "selected"
) -> Ensemble:
    """Score the mean of the probabilities of finished runs of one fold.

    Args:
        runs: Two run folders or more.
        data: Current path of the data, if it has changed.
        checkpoint: Which checkpoint of each run.

    Raises:
        ValueError: fewer than two runs, one that is not finished, or runs that cannot be averaged.
    """
    return score_members(*open_members(runs, data), checkpoint)


def score_members(
    folders: Sequence[RunFolder],
    fold: Fold,
    checkpoint: Checkpoint,
    tick: Callable[[int], None] | None = None,
    **device: Any,
) -> Ensemble:
    """The same for open runs, with one model in memory at a time; `tick` is called with each batch's image count."""
    rows = np.concatenate(list(fold.test.values()))
    each = [_probabilities(folder, fold, rows, checkpoint, tick, **device) for folder in folders]
    members = [
        Scored(folder.config.method, folder.path.resolve().name, *score(values, rows, fold))
        for folder, values in zip(folders, each, strict=True)
    ]
    mean = np.mean(each, axis=0)
    return Ensemble(fold, rows, mean, tuple(members), *score(mean, rows, fold))


def open_members(runs: Sequence[str | Path], data: str | None = None) -> tuple[list[RunFolder], Fold]:
    """The runs' folders and the fold that they share."""
    if len({Path(run).resolve() for run in runs}) < max(len(runs), 2):
        raise ValueError(f"an ensemble needs at least two different runs, got {', '.join(map(str, runs)) or 'none'}")
    folders, fold = open_runs(list(map(str, runs)), data)
    if other := next((folder for folder in folders if folder.config.task != "mdg"), None):
        raise ValueError(
            f"{other.path} is a run of task {other.config.task}, whose outputs for new classes mean something else in "
            "every run; an ensemble needs runs of task mdg"
        )
    if not fold.test:
        raise ValueError(
            f"{folders[0].path} was trained on all domains (--unseen none): it has no unseen domain to score"
        )
    return folders, fold


def score(probabilities: np.ndarray, rows: np.ndarray, fold: Fold) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of the 80 % part and of the whole, as a run's own test record has them."""
    truth, inside = fold.truth[rows], np.isin(rows, fold.test["in"])
    confusion = np.zeros((2, fold.size, fold.size), dtype=np.int64)  # [the rest, the 80 % part]
    np.add.at(confusion, (inside.astype(int), truth, probabilities.argmax(1)), 1)
    part = fold.scores(confusion[1]) | probability_scores(truth[inside], probabilities[inside])
    return part, fold.scores(confusion.sum(0)) | probability_scores(truth, probabilities)


def _probabilities(
    folder: RunFolder,
    fold: Fold,
    rows: np.ndarray,
    checkpoint: Checkpoint,
    tick: Callable[[int], None] | None,
    **device: Any,
) -> np.ndarray:
    """(N, C) float64, part after part."""
    predictor = load_run(folder.path, checkpoint, **device)
    check_classes(folder, predictor, fold)
    subject = Subject(
        folder.config.method, folder.path.resolve().name, predictor, fold, predictor.store(fold.table.files)
    )
    parts = [
        subject.probabilities(subject.pixels(part)).cpu().numpy().astype(float)
        for of_part in fold.test.values()
        for part, _ in batches(of_part, len, BATCH, tick)
    ]
    return np.concatenate(parts)

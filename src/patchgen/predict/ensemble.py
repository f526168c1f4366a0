"""Ensemble of runs: the mean of their probabilities, scored on the unseen domain that all of them left out.

    found = score_ensemble(["runs/4f2a9c01b7de", "runs/90be2f11c3aa"])
    found.whole["accuracy"], [member.whole["accuracy"] for member in found.members]

For runs trained with `+sma` this is EoA, the ensemble of averages (Arpit et al., NeurIPS 2022). Runs may differ in
method, backbone, image size and seed, but not in data, classes and unseen domain. The 80 % part is that of the first
run's split, for all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.methods import method_class
from patchgen.predict.predictor import Checkpoint, load_run
from patchgen.predict.subjects import Subject, check_data
from patchgen.runs.folder import RunFolder
from patchgen.tasks import Fold, make_fold
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
    folders: Sequence[RunFolder], fold: Fold, checkpoint: Checkpoint, tick: Callable[[int], None] | None = None
) -> Ensemble:
    """The same for open runs, with one model in memory at a time; `tick` is called with each batch's image count."""
    rows = np.concatenate(list(fold.test.values()))
    total, members = np.zeros((len(rows), len(fold.classes))), []
    for folder in folders:
        found = _probabilities(_subject(folder, fold, checkpoint), tick)
        total += found
        members.append(Scored(folder.config.method, folder.path.resolve().name, *score(found, rows, fold)))
    mean = total / len(folders)
    return Ensemble(fold, rows, mean, tuple(members), *score(mean, rows, fold))


def open_members(runs: Sequence[str | Path], data: str | None = None) -> tuple[list[RunFolder], Fold]:
    """The runs' folders and the fold that they share."""
    if len({Path(run).resolve() for run in runs}) < max(len(runs), 2):
        raise ValueError(f"an ensemble needs at least two different runs, got {', '.join(map(str, runs)) or 'none'}")
    folders = [_finished(run) for run in runs]
    first = folders[0]
    for other in folders[1:]:
        if other.config.unseen != first.config.unseen:
            raise ValueError(
                f"{other.path} left out {other.config.unseen!r}, but {first.path} left out {first.config.unseen!r}; "
                "only runs of one fold can be averaged"
            )
    fold = make_fold(replace(first.config, data=data) if data else first.config)
    if not fold.test:
        raise ValueError(f"{first.path} was trained on all domains (--unseen none): it has no unseen domain to score")
    for folder in folders:
        check_data(folder, fold, data)
    return folders, fold


def score(probabilities: np.ndarray, rows: np.ndarray, fold: Fold) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of the 80 % part and of the whole, as a run's own test record has them."""
    truth, inside = fold.truth[rows], np.isin(rows, fold.test["in"])
    confusion = np.zeros((2, fold.size, fold.size), dtype=np.int64)  # [the rest, the 80 % part]
    np.add.at(confusion, (inside.astype(int), truth, probabilities.argmax(1)), 1)
    part = fold.scores(confusion[1]) | probability_scores(truth[inside], probabilities[inside])
    return part, fold.scores(confusion.sum(0)) | probability_scores(truth, probabilities)


def _finished(run: str | Path) -> RunFolder:
    folder = RunFolder.open(run)
    if not folder.done:
        raise ValueError(f"{run} is not finished (it has no file `done`); the same `patchgen train` command resumes it")
    if folder.config.task != "mdg":
        raise ValueError(
            f"{run} is a run of task {folder.config.task}, whose outputs for new classes mean something else in every "
            "run; an ensemble needs runs of task mdg"
        )
    folder.require_plugins()
    if method_class(folder.config.method).mask == "true":
        raise ValueError(f"{run}: method {folder.config.method!r} is given the true mask, an upper bound; leave it out")
    return folder


def _subject(folder: RunFolder, fold: Fold, checkpoint: Checkpoint) -> Subject:
    predictor, config = load_run(folder.path, checkpoint), folder.config
    if predictor.classes != fold.classes:
        raise ValueError(
            f"{folder.path} was trained for the classes {', '.join(predictor.classes)}, but the data have "
            f"{', '.join(fold.classes)}; only runs with the same classes can be averaged"
        )
    return Subject(config.method, folder.path.resolve().name, predictor, fold, predictor.store(fold.table.files))


def _probabilities(subject: Subject, tick: Callable[[int], None] | None) -> np.ndarray:
    """(N, C) float64, part after part."""
    found = []
    for rows in subject.fold.test.values():
        for start in range(0, len(rows), BATCH):
            chosen = rows[start : start + BATCH]
            found.append(subject.probabilities(subject.pixels(chosen)).cpu().numpy().astype(float))
            if tick:
                tick(len(chosen))
    return np.concatenate(found)

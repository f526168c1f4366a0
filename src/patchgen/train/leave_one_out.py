"""`--select leave-one-out`: DomainBed's leave-one-domain-out cross-validation, over the source domains alone.

Each source is left out in turn, in a training without the unseen domain, and scored on its held-out part at every
evaluation. The score of a step is the mean over the sources; it selects the checkpoint of the run, and in tables the
run among several settings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from patchgen.config import Config
from patchgen.runs.folder import RunFolder, run_name
from patchgen.tasks import Fold, make_fold

FOLDER = ".leave-one-out"  # inside the run's; hidden from tables of runs


def train_without_each(
    work: Callable[..., None],
    lock: Callable[[RunFolder], AbstractContextManager[Any]],
    config: Config,
    run: RunFolder,
    fold: Fold,
    quiet: bool,
) -> None:
    """Train without each source in turn; finished trainings are not repeated.

    Args:
        work: Trains and scores a fold.
        lock: Holds a run folder.
    """
    for name in fold.validation:
        inner = replace(config, unseen=name, select="oracle", swad=False, patience=None)
        whole = make_fold(inner, fold.table)
        part = replace(
            whole,
            train={d: rows for d, rows in whole.train.items() if d in fold.train},
            validation={d: rows for d, rows in whole.validation.items() if d in fold.validation},
        )
        place = RunFolder.create(run.path / FOLDER, inner, run_name(inner, run.data), run.data)
        with lock(place):
            if not place.done:
                part.write_rows(place.path)
                work(inner, place, part, quiet)


def scores_without_each(run: RunFolder, step: int, metric: str) -> dict[str, float]:
    """Each source's score at an evaluation of the training without it."""
    inner = [RunFolder(path) for path in sorted((run.path / FOLDER).iterdir())]
    return {
        one.config.unseen: record["oracle"][metric]
        for one in inner
        for record in one.records("evaluation")
        if record["step"] == step
    }

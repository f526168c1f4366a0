"""The lifecycle of a run, for every task: created or opened, locked, resumed, saved, finished.

    from patchgen.config import Config
    from patchgen.train.lifecycle import train
    run = train(Config(data="photos", unseen="site_c"), "runs")

`train` reads the data, names the run and holds its lock; the loop of its task (`train/fold.py`, `ccd/loop.py`) trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import cast

from patchgen.common.progress import is_first, logger
from patchgen.config import Config, Settings
from patchgen.data.content import digests
from patchgen.data.table import Table
from patchgen.runs.folder import RunFolder, run_name
from patchgen.runs.precision import AUTO, with_precision
from patchgen.tasks import Fold, get_task, make_fold
from patchgen.train.track import make_tracker

LEFT_OUT = ".leave-one-out"  # the trainings without each source, inside the run; hidden from tables of runs


def train(
    config: Settings, out: str | Path, table: Table | None = None, *, quiet: bool = False, track: str | bool = False
) -> RunFolder:
    """Train and score one run; a finished run is returned unchanged, an interrupted one is resumed.

    Args:
        out: Parent of the run folder.
        table: The data, if it has already been read.
        track: Also log to `tensorboard` (or True), `wandb` or `mlflow` (`patchgen.train.track`).
    """
    task = get_task(config.task)
    task.make_method(config)  # report a wrong name before reading the data
    data = task.read(config, table)
    fingerprint = data.fingerprint()
    if config.precision == AUTO:
        config = with_precision(config, out, fingerprint)
        if not quiet and is_first(line := f"precision: {config.precision}, by `auto`"):
            logger.info(line)
    name = run_name(config, fingerprint)
    new = not (Path(out) / name).exists()
    run = RunFolder.create(out, config, name, fingerprint)
    if _first_process():
        run.check_content(digests(data.table), data.table.paths)
    if run.done:
        return run
    tracker = make_tracker(track) if track else None
    if tracker:
        run.listeners.append(tracker)
    with _locked(run):
        if run.done:  # finished by another process since the check above
            return run
        run.renew_settings(config)
        data.write_rows(run.path)
        loop: Callable[..., None] = import_module(task.loop).work
        try:
            if isinstance(config, Config) and config.select == "leave-one-out":
                _train_without_each(loop, config, run, cast(Fold, data), quiet)
            loop(config, run, data, quiet)
        except ValueError:
            if new and _first_process():
                run.remove_refused()
            raise
        if tracker:
            tracker.close()
    return run


def _locked(run: RunFolder) -> AbstractContextManager[None]:
    return run.locked() if _first_process() else nullcontext()


def _first_process() -> bool:
    """In a job started by torchrun or Slurm, the first process holds the run's lock for all."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def _train_without_each(loop: Callable[..., None], config: Config, run: RunFolder, fold: Fold, quiet: bool) -> None:
    """`--select leave-one-out`: DomainBed's leave-one-domain-out cross-validation, over the source domains alone.

    Each source is left out of a training without the unseen domain; finished trainings are not repeated.
    """
    for source in fold.validation:
        inner = replace(config, unseen=source, select="oracle", swad=False, patience=None)
        whole = make_fold(inner, fold.table)
        part = replace(
            whole,
            train={d: rows for d, rows in whole.train.items() if d in fold.train},
            validation={d: rows for d, rows in whole.validation.items() if d in fold.validation},
        )
        place = RunFolder.create(run.path / LEFT_OUT, inner, run_name(inner, run.data), run.data)
        with _locked(place):
            if not place.done:
                part.write_rows(place.path)
                loop(inner, place, part, quiet)


def scores_without_each(run: RunFolder, step: int, metric: str) -> dict[str, float]:
    """Each source's score at an evaluation of the training without it."""
    runs = [RunFolder(path) for path in sorted((run.path / LEFT_OUT).iterdir())]
    return {
        left_out.config.unseen: record["oracle"][metric]
        for left_out in runs
        for record in left_out.records("evaluation")
        if record["step"] == step
    }

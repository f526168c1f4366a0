"""From recipes to jobs: each run once, with the name of its folder.

    jobs = plan([read_recipe("configs/small/ablation-small.yaml")], "runs")

Each data set is read once for this, so that a missing folder or a misspelt domain is reported before any work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.ccd.settings import StreamConfig
from patchgen.config import Config, Settings
from patchgen.data.content import digests
from patchgen.data.table import Table, fingerprint, read_table
from patchgen.runs.folder import RunFolder, run_name
from patchgen.runs.names import data_name
from patchgen.runs.precision import with_precision
from patchgen.sweep.jobs import Job
from patchgen.sweep.recipe import PlannedRun, Recipe, expand
from patchgen.tasks import get_task
from patchgen.tasks.mdg import leaves_out

if TYPE_CHECKING:
    from patchgen.ccd.data import Stream


def plan(recipes: Iterable[Recipe], out: str | Path, **changes: Any) -> list[Job]:
    """The jobs of the recipes, each run once; the data are read, and every run's settings and method are checked.

    Args:
        changes: Settings that say where and how a run is computed, such as `threads`; None keeps the recipe's values.
    """
    data, jobs = DataSets(), dict[str, Job]()
    changes = {key: value for key, value in changes.items() if value is not None}
    for recipe in recipes:
        try:
            for run in expand(recipe, data.domains):
                _add(jobs, replace(run, config=replace(run.config, **changes)), Path(out), data)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(str(recipe.path)) else f"{recipe.path}: {text}") from error
    return list(jobs.values())


def plan_runs(runs: Iterable[PlannedRun], out: str | Path, data: DataSets) -> list[Job]:
    """The jobs of single runs, each run once, with the name of its folder."""
    jobs: dict[str, Job] = {}
    for run in runs:
        _add(jobs, run, Path(out), data)
    return list(jobs.values())


def _add(jobs: dict[str, Job], run: PlannedRun, out: Path, data: DataSets) -> None:
    """Add the job of a run, or its label to the job that is the same run."""
    config = run.config
    try:
        get_task(config.task).make_method(config)
        if isinstance(config, Config):
            table, digest = data.table(config.data, config.benchmark, config.options)
            config = with_precision(config, out, digest)
            leaves_out(config, table.domains)
            size = config.steps
        else:
            stream, digest = data.stream(config)
            config = with_precision(config, out, digest)
            table, size = stream.table, config.epochs * len(stream.stages)
    except ValueError as error:
        raise ValueError(f"{run.label}: {error}") from error
    name = run_name(config, digest)
    if name not in jobs and (folder := RunFolder(out / name)).path.is_dir():
        data.check_content(table, digest, folder)
    job = jobs.get(name) or Job((), (), config, out, name, size)
    jobs[name] = replace(job, labels=_once((*job.labels, run.label)), rows=_once((*job.rows, run.row)))


class DataSets:
    """Each data set is read once for all the runs on it."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[Table, str]] = {}
        self._streams: dict[str, tuple[Stream, str]] = {}
        self._content: dict[str, np.ndarray] = {}  # by fingerprint

    def domains(self, settings: Mapping[str, Any]) -> Sequence[str]:
        """The domains that could be left out, for settings without an unseen one."""
        return self.table(settings["data"], settings.get("benchmark"), settings.get("options") or {})[0].domains

    def table(self, data: str, benchmark: str | None, options: dict[str, str]) -> tuple[Table, str]:
        """The table and its fingerprint."""
        key = json.dumps([data, benchmark, options], sort_keys=True)
        if key not in self._tables:
            table = read_table(data, benchmark=benchmark, options=options)
            self._tables[key] = table, fingerprint(table)
        return self._tables[key]

    def stream(self, config: StreamConfig) -> tuple[Stream, str]:
        """The stream and its fingerprint."""
        key = json.dumps([config.data, config.schedule, config.holdout])
        if key not in self._streams:
            from patchgen.ccd.data import make_stream

            stream = make_stream(config)
            self._streams[key] = stream, stream.fingerprint()
        return self._streams[key]

    def check_content(self, table: Table, digest: str, run: RunFolder) -> None:
        """Raise ValueError if images of an existing run have changed under the same names and sizes."""
        if digest not in self._content:
            self._content[digest] = digests(table)
        run.check_content(self._content[digest], table.paths)


PROTOCOL = ("data", "runs", "steps", "evaluated every", "batch", "learning rates", "methods")


def protocols(jobs: Iterable[Job]) -> list[tuple[str, ...]]:
    """What the runs on each data set share, in the columns of `PROTOCOL`: one row per budget and rates."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for job in jobs:
        groups.setdefault(_budget(job.config), []).append(job.config.method)
    return [(key[0], str(len(methods)), *key[1:], ", ".join(_once(methods))) for key, methods in groups.items()]


def _budget(config: Settings) -> tuple[str, ...]:
    """Data, steps, interval of evaluations, batch and learning rates, in words."""
    rates = {"": config.lr, "backbone ": getattr(config, "lr_backbone", None), "module ": config.lr_module}
    words = ", ".join(f"{part}{rate:g}" for part, rate in rates.items() if rate is not None)
    if isinstance(config, StreamConfig):
        epochs = f"{config.epochs} epochs per stage", f"{config.val_every} epochs"
        return data_name(config), *epochs, f"{config.batch} of 2 views", words
    assert isinstance(config, Config)
    return data_name(config), str(config.steps), str(config.eval_every), f"{config.batch_per_domain} a domain", words


def _once(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))

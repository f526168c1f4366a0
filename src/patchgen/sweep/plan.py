"""From recipes to jobs: each run once, with the name of its folder.

    jobs = plan([read_recipe("configs/small/ablation-small.yaml")], "runs")

Each data set is read once for this, so that a missing folder or a misspelt domain is reported before any work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from patchgen.config import Config, Settings
from patchgen.data.content import digests
from patchgen.data.table import Table, fingerprint, read_table
from patchgen.runs.folder import RunFolder, run_name
from patchgen.runs.names import data_name
from patchgen.runs.precision import AUTO, with_precision
from patchgen.sweep.jobs import Job
from patchgen.sweep.recipe import Planned, Recipe, expand
from patchgen.sweep.recipe import Settings as Given
from patchgen.tasks import get_task
from patchgen.tasks.mdg import leaves_out

if TYPE_CHECKING:
    from patchgen.ccd.data import Stream
    from patchgen.ccd.settings import StreamConfig


def plan(recipes: Iterable[Recipe], out: str | Path, **changes: Any) -> list[Job]:
    """The jobs of the recipes, each run once; the data are read, and every run's settings and method are checked.

    Args:
        changes: Settings that say where and how a run is computed, such as `threads`; None keeps the recipe's values.
    """
    data, given = DataSets(), {key: value for key, value in changes.items() if value is not None}
    jobs: dict[str, Job] = {}
    for recipe in recipes:
        try:
            planned = [replace(run, config=replace(run.config, **given)) for run in expand(recipe, data.domains)]
            found = plan_runs(planned, out, data)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(str(recipe.path)) else f"{recipe.path}: {text}") from error
        for job in found:
            known = jobs.setdefault(job.run, job)
            jobs[job.run] = replace(
                known, labels=_once((*known.labels, *job.labels)), rows=_once((*known.rows, *job.rows))
            )
    return list(jobs.values())


def plan_runs(planned: Iterable[Planned], out: str | Path, data: DataSets) -> list[Job]:
    """The jobs of single runs, each run once, with the name of its folder."""
    jobs: dict[str, Job] = {}
    for one in planned:
        try:
            get_task(one.config.task).make_method(one.config)
            config = data.settled(one.config, out)
            name, size = data.name_and_size(config)
        except ValueError as error:
            raise ValueError(f"{one.label}: {error}") from error
        if name not in jobs and (folder := RunFolder(Path(out) / name)).path.is_dir():
            data.check_content(config, folder)
        known = jobs.get(name) or Job((), (), config, Path(out), name, size)
        jobs[name] = replace(known, labels=_once((*known.labels, one.label)), rows=_once((*known.rows, one.row)))
    return list(jobs.values())


class DataSets:
    """Each data set is read once for all the runs on it."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[Table, str]] = {}  # with the fingerprint
        self._streams: dict[str, tuple[Stream, str]] = {}
        self._content: dict[str, np.ndarray] = {}  # by fingerprint

    def domains(self, settings: Given) -> Sequence[str]:
        """The domains that could be left out, for settings without an unseen one."""
        return self._table(settings["data"], settings.get("benchmark"), settings.get("options") or {})[0].domains

    def settled(self, config: Settings, out: str | Path) -> Settings:
        """The settings with `auto` replaced by a precision."""
        if config.precision != AUTO:
            return config
        if isinstance(config, Config):
            return with_precision(config, out, self._table(config.data, config.benchmark, config.options)[1])
        return with_precision(config, out, self._stream(cast("StreamConfig", config))[1])

    def name_and_size(self, config: Settings) -> tuple[str, int]:
        """The run's name, and its number of steps (for a stream: epochs of all stages)."""
        if config.task == "ccd":
            stream, digest = self._stream(cast("StreamConfig", config))
            return run_name(config, digest), cast("StreamConfig", config).epochs * len(stream.stages)
        fold = cast(Config, config)
        table, digest = self._table(fold.data, fold.benchmark, fold.options)
        leaves_out(fold, table.domains)
        return run_name(fold, digest), fold.steps

    def check_content(self, config: Settings, run: RunFolder) -> None:
        """Raise ValueError if images of an existing run have changed under the same names and sizes."""
        if config.task == "ccd":
            stream, digest = self._stream(cast("StreamConfig", config))
            table = stream.table
        else:
            fold = cast(Config, config)
            table, digest = self._table(fold.data, fold.benchmark, fold.options)
        if digest not in self._content:
            self._content[digest] = digests(table)
        run.check_content(self._content[digest], table.paths)

    def _table(self, data: str, benchmark: str | None, options: dict[str, str]) -> tuple[Table, str]:
        key = json.dumps([data, benchmark, options], sort_keys=True)
        if key not in self._tables:
            table = read_table(data, benchmark=benchmark, options=options)
            self._tables[key] = table, fingerprint(table)
        return self._tables[key]

    def _stream(self, config: StreamConfig) -> tuple[Stream, str]:
        key = json.dumps([config.data, config.schedule, config.holdout])
        if key not in self._streams:
            from patchgen.ccd.data import make_stream

            stream = make_stream(config)
            self._streams[key] = stream, stream.fingerprint()
        return self._streams[key]


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
    if config.task == "ccd":
        stream = cast("StreamConfig", config)
        epochs = f"{stream.epochs} epochs per stage", f"{stream.val_every} epochs"
        return data_name(stream), *epochs, f"{stream.batch} of 2 views", words
    fold = cast(Config, config)
    return data_name(fold), str(fold.steps), str(fold.eval_every), f"{fold.batch_per_domain} a domain", words


def _once(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))

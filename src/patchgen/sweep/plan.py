"""From recipes to jobs: each run once, with the name of its folder; and what they will cost."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.ccd.settings import StreamConfig
from patchgen.common.text import duration
from patchgen.config import Config, Settings
from patchgen.data.images import digests
from patchgen.data.table import Table, check_shared, fingerprint, read_table
from patchgen.runs.folder import RunFolder, run_name, with_precision
from patchgen.runs.scores import data_name
from patchgen.sweep.jobs import Job
from patchgen.sweep.recipe import PlannedRun, Recipe, errors_named, expand
from patchgen.tasks import get_task
from patchgen.tasks.mdg import leaves_out

if TYPE_CHECKING:
    from patchgen.ccd.data import Stream


def plan(recipes: Iterable[Recipe], out: str | Path, **changes: Any) -> list[Job]:
    """The jobs of the recipes, each run once, checked with their data; `changes` replace settings, except by None."""
    data, jobs = DataSets(), dict[str, Job]()
    changes = {key: value for key, value in changes.items() if value is not None}
    for recipe in recipes:
        with errors_named(str(recipe.path)):
            runs = (replace(run, config=replace(run.config, **changes)) for run in expand(recipe, data.domains))
            plan_runs(runs, out, data, jobs)
    return list(jobs.values())


def plan_runs(
    runs: Iterable[PlannedRun], out: str | Path, data: "DataSets", jobs: dict[str, Job] | None = None
) -> list[Job]:
    """The jobs of single runs, added to `jobs`; one that is there already gets another label."""
    jobs = {} if jobs is None else jobs
    for run in runs:
        config = run.config
        with errors_named(run.label):
            get_task(config.task).make_method(config)
            if isinstance(config, Config):
                table, digest = data.table(config.data, config.benchmark, config.options)
                leaves_out(config, table.domains)
                size = config.steps
            else:
                stream, digest = data.stream(config)
                table, size = stream.table, config.epochs * len(stream.stages)
            config = with_precision(config, out, digest)
        name = run_name(config, digest)
        folder = RunFolder(Path(out) / name)
        if name not in jobs and folder.path.is_dir():
            data.check_content(table, digest, folder)
        job = jobs.get(name) or Job((), (), config, Path(out), name, size)
        jobs[name] = replace(job, labels=_once((*job.labels, run.label)), rows=_once((*job.rows, run.row)))
    return list(jobs.values())


class DataSets:
    """Each data set is read once for all the runs on it, with its fingerprint."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[Table, str]] = {}
        self._streams: dict[str, tuple[Stream, str]] = {}
        self._content: dict[str, np.ndarray] = {}  # by fingerprint

    def domains(self, settings: Mapping[str, Any]) -> Sequence[str]:
        """The domains that could be left out, for settings without an unseen one."""
        return self.table(settings["data"], settings.get("benchmark"), settings.get("options") or {})[0].domains

    def table(self, data: str, benchmark: str | None, options: dict[str, str]) -> tuple[Table, str]:
        key = json.dumps([data, benchmark, options], sort_keys=True)
        if key not in self._tables:
            table = check_shared(read_table(data, benchmark=benchmark, options=options))
            self._tables[key] = table, fingerprint(table)
        return self._tables[key]

    def stream(self, config: StreamConfig) -> "tuple[Stream, str]":
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


# Cost

# ViT-S/14 with tuned LayerNorms at 112 px on two CPU cores; time grows with the pixels and the width of the backbone
RATE, RATE_PIXELS = 15.0, 112
# cost relative to a ViT-S/14, by a word in the name
WIDTHS = {"tiny": 0.25, "small": 1.0, "base": 4.0, "large": 14.0, "b16": 3.2, "resnet50": 0.75, "regnety": 2.9}
FINISHED = "finished runs like it"


@dataclass(frozen=True)
class Forecast:
    seconds: float  # of all remaining runs, sequentially
    bases: Counter[str]  # basis of the estimate -> number of runs

    def lines(self, workers: int) -> list[str]:
        """Human-readable lines."""
        text = f"forecast: {duration(self.seconds)} of work"
        text += f", about {duration(self.seconds / workers)} with {workers} workers" if workers > 1 else ""
        return [text, *(f"  {count} run{'s' * (count > 1)} from {basis}" for basis, count in self.bases.items())]


def predict_cost(jobs: Sequence[Job], out: str | Path, rate: float | None = None) -> Forecast:
    """The time left for all jobs, from the finished runs in `out`, or by `rate`, training images/s of one worker."""
    known: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for run in (RunFolder(done.parent) for done in sorted(Path(out).glob("*/done"))):
        try:
            config, seconds = run.settings, seconds_of(run)
        except (ValueError, OSError):  # skip damaged folders
            continue
        known[(config.method, *config.cost_key())].append(seconds)
        known[config.cost_key()].append(seconds)
    total, bases = 0.0, Counter[str]()
    for job in jobs:
        if not job.folder.done:
            seconds, basis = _estimate(job.config, known, rate)
            total += seconds * (1 - job.progress / job.size)
            bases[basis] += 1
    return Forecast(total, bases)


def _estimate(config: Settings, known: dict[tuple[Any, ...], list[float]], rate: float | None) -> tuple[float, str]:
    key = config.cost_key()
    if seconds := known.get((config.method, *key)) or known.get(key):
        return statistics.fmean(seconds), FINISHED
    if rate:
        return config.images_seen() / rate, f"the rate given, {rate:g} images a second"
    stated = f"a stated rate ({RATE:g} images/s of a ViT-S at {RATE_PIXELS} px on two CPU cores; --rate gives your own)"
    name = Path(config.backbone).name.lower()
    width = next((cost for word, cost in WIDTHS.items() if word in name), 1.0)
    return config.images_seen() / (RATE / width * (RATE_PIXELS / config.image_size) ** 2), stated


def seconds_of(run: RunFolder) -> float:
    """Seconds of a finished run: of its training steps, or by its file times if those, lost in a copy, say more."""
    steps = sum(record.get("seconds", 0.0) for record in run.records())
    try:
        return max(steps, (run.path / "done").stat().st_mtime - (run.path / "env.json").stat().st_mtime)
    except FileNotFoundError:
        return steps

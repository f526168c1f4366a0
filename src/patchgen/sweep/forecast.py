"""Estimate the cost of a sweep before it starts: from similar finished runs, else from a default rate.

forecast = predict_cost(jobs, finished_runs("runs"), rate=None)
forecast.seconds, forecast.bases           # total for one worker; how many runs are estimated in which way
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchgen.common.text import duration
from patchgen.config import Settings
from patchgen.runs.folder import RunFolder
from patchgen.sweep.jobs import Job

# ViT-S/14 with tuned LayerNorms at 112 px on two CPU cores; time grows with the pixels and the width of the backbone
RATE, RATE_PIXELS = 15.0, 112
# cost relative to a ViT-S/14, by a word in the name
WIDTHS = {"tiny": 0.25, "small": 1.0, "base": 4.0, "large": 14.0, "b16": 3.2, "resnet50": 0.75, "regnety": 2.9}
SAME, ALIKE = "finished runs of the same method", "finished runs of other methods"


@dataclass(frozen=True)
class Forecast:
    seconds: float  # of all remaining runs, sequentially
    bases: Counter[str]  # basis of the estimate -> number of runs

    def lines(self, workers: int) -> list[str]:
        """Human-readable lines."""
        total, each = duration(self.seconds), duration(self.seconds / workers)
        text = f"forecast: {total} of work" + (f", about {each} with {workers} workers" if workers > 1 else "")
        return [text, *(f"  {count} run{'s' * (count > 1)} from {basis}" for basis, count in self.bases.items())]


def predict_cost(jobs: Sequence[Job], finished: Iterable[RunFolder], rate: float | None = None) -> Forecast:
    """Sum of the estimated time of the unfinished part of each job.

    Args:
        rate: Training images per second of one worker, for runs unlike all finished ones; ``RATE`` if None.
    """
    known: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for run in finished:
        try:
            config, seconds = run.settings, seconds_of(run)
        except ValueError:  # skip damaged folders
            continue
        known[(config.method, *config.cost_key())].append(seconds)
        known[config.cost_key()].append(seconds)
    total, bases = 0.0, Counter[str]()
    for job in jobs:
        if job.folder.done:
            continue
        seconds, basis = _estimate(job.config, known, rate)
        total += seconds * (1 - job.progress / job.size)
        bases[basis] += 1
    return Forecast(total, bases)


def _estimate(config: Settings, known: dict[tuple[Any, ...], list[float]], rate: float | None) -> tuple[float, str]:
    like = config.cost_key()
    for key, basis in (((config.method, *like), SAME), (like, ALIKE)):
        if seconds := known.get(key):
            return statistics.fmean(seconds), basis
    if rate:
        return config.images_seen() / rate, f"the rate given, {rate:g} images a second"
    stated = f"a stated rate ({RATE:g} images/s of a ViT-S at {RATE_PIXELS} px on two CPU cores; --rate gives your own)"
    return config.images_seen() / usual_rate(config), stated


def usual_rate(config: Settings) -> float:
    """The default rate, scaled to the run's pixels and to the backbone's size, taken from its name."""
    return RATE / width(config) * (RATE_PIXELS / config.image_size) ** 2


def width(config: Settings) -> float:
    """Cost of the backbone relative to a ViT-S/14."""
    name = Path(config.backbone).name.lower()
    return next((cost for word, cost in WIDTHS.items() if word in name), 1.0)


def seconds_of(run: RunFolder) -> float:
    """How long a finished run took.

    The records have the time of the training steps; the time from the start of its last process (env.json) to `done`
    also includes validation and scoring. A copied folder has lost these file times, a resumed run has only those of its
    last part.
    """
    steps = sum(record.get("seconds", 0.0) for record in run.records())
    try:
        whole = (run.path / "done").stat().st_mtime - (run.path / "env.json").stat().st_mtime
    except FileNotFoundError:
        whole = 0.0
    return max(steps, whole)


def finished_runs(out: str | Path) -> list[RunFolder]:
    """The finished runs of a folder."""
    return [
        RunFolder(done.parent) for done in sorted(Path(out).glob("*/done")) if (done.parent / "config.yaml").exists()
    ]

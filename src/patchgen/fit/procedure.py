"""The whole fit: leave each site out in turn, train on all of them, calibrate.

    model = fit(Config(data="tiles", unseen="none"), "runs")
    model.about["expected"], model.predictor

Every training is a run folder below `runs`, named by its settings, so a fit that was killed goes on when it is asked
for again, and folds that `patchgen benchmark` or an earlier fit has made are not made twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from patchgen.common.files import cache_dir, expanded
from patchgen.common.progress import Progress
from patchgen.config import NO_DOMAIN, Config
from patchgen.data.images import ImageStore
from patchgen.data.table import Table, read_table
from patchgen.fit.calibrate import calibrate, calibration_images
from patchgen.fit.expect import Expected, expect
from patchgen.predict.model_folder import Model, backbone_facts
from patchgen.predict.predictor import Checkpoint, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import score_record
from patchgen.runs.selection import best
from patchgen.runs.tensors import load_tensors
from patchgen.tasks import Fold, make_fold
from patchgen.train.lifecycle import train


@dataclass(frozen=True)
class SiteFold:
    """How a model trained without this site did at it."""

    site: str
    accuracy: float
    images: int
    validation: float  # mean accuracy at the held-out parts of the sites it was trained on
    uncovered: list[str]  # classes that only this site has: no other site could teach them
    run: str


class Clock:
    """How long the trainings of a fit will take, from those that were made so far."""

    def __init__(self, work: list[int], say: Callable[[str], None]) -> None:
        self.work, self.say, self.done = work, say, 0
        self.seconds, self.trained = 0.0, 0

    @contextmanager
    def training(self, title: str) -> Iterator[None]:
        """Announce a training and take its time."""
        number, left = self.done, ""
        if self.trained:
            minutes = self.seconds / self.trained * sum(self.work[number:]) / 60
            left = f"; about {minutes:.0f} min left" if minutes >= 1 else "; less than a minute left"
        self.say(f"training {number + 1} of {len(self.work)}: {title}{left}")
        start = time.monotonic()
        yield
        self.done += 1
        seconds = time.monotonic() - start
        if seconds > 1:  # what an earlier fit has finished is only looked up, and tells nothing of the rest
            self.seconds, self.trained = self.seconds + seconds, self.trained + self.work[number]


def fit(
    config: Config, runs: str | Path, *, expecting: bool = True, split_given: bool = True, quiet: bool = False
) -> Model:
    """Train a model to hand on.

    Args:
        config: With `unseen` "none" the model is trained on all sites, after each was left out once (`expecting`);
            with a site's name it is trained without that site and scored on it.
        runs: Parent of the run folders.
        split_given: False where `config.split` is nobody's choice: a manifest's groups then decide.

    Raises:
        ValueError: settings or data that cannot be trained with; found before the first training where possible.
    """
    if config.task != "mdg":
        raise ValueError(f"fit trains classifiers for unseen sites, task 'mdg', not {config.task!r}")
    table = read_table(config.data, benchmark=config.benchmark, options=config.options)
    if config.unseen == NO_DOMAIN and NO_DOMAIN in table.domains:
        raise ValueError(f"a site is called {NO_DOMAIN!r}, which here means that no site is left out; rename it")
    say = _say(quiet)
    if not split_given and _names_groups(config, table):
        say("patients stay together: --split group, because the manifest names groups")
        config = replace(config, split="group")
    final = make_fold(config, table)
    for note in final.notes:
        say(f"data: {note}")
    left_out = list(table.domains) if expecting and not final.test else []
    sites = {site: make_fold(replace(config, unseen=site), table) for site in left_out}  # may refuse: before any work
    clock = Clock([len(fold.train) for fold in (*sites.values(), final)], say)
    folds = []
    for site, fold in sites.items():
        with clock.training(f"without {site}, to be scored on it"):
            folds.append(_site_fold(train(replace(config, unseen=site), runs, table, quiet=quiet), fold))
    with clock.training(f"without {final.unseen}, to be scored on it" if final.test else "on all sites"):
        run = train(config, runs, table, quiet=quiet)
    if final.test:
        folds = [_site_fold(run, final)]
    return finish(run, final, folds, quiet)


def finish(run: RunFolder, fold: Fold, folds: list[SiteFold], quiet: bool = False) -> Model:
    """The model of a finished run, calibrated, with all that its card says."""
    checkpoint = reported(run.config)
    predictor = load_run(run.path, checkpoint)
    whole = make_fold(replace(run.config, val_images=None), fold.table)  # every held-out image, not a sample of them
    files = [fold.table.file(i) for i in range(len(fold.table))]
    store = ImageStore(files, run.config.image_size, cache_dir() if run.config.cache else None)
    store.stain = predictor.stain
    with Progress("calibrating", calibration_images(whole), quiet=quiet) as bar:
        predictor.confidence, report = calibrate(predictor, whole, store, bar.advance)
    header = load_tensors(run.checkpoint(checkpoint))[1]
    scores = _expected(folds) if folds else None
    about: dict[str, Any] = {
        "data": data_facts(fold),
        "expected": asdict(scores) if scores else None,
        "folds": [asdict(one) for one in folds],
        "calibration": asdict(report),
        "backbone": backbone_facts(predictor, header["backbone"]),
        "run": run.path.name,
        "checkpoint": checkpoint,
    }
    return Model(predictor, about)


def reported(config: Config) -> Checkpoint:
    """Weight averaging is asked for to be used."""
    return "swad" if config.swad else "selected"


def data_facts(fold: Fold) -> dict[str, Any]:
    """What the card says of the images: names and counts, no path."""
    table: Table = fold.table
    return {
        "sites": list(table.domains),
        "counts": table.counts(),
        "unseen": fold.unseen if fold.test else None,
        "trained_on": sum(len(rows) for rows in fold.train.values()),
        "groups": len(set(table.group)) if table.group else None,
        "split": fold.splits.rule,
        "benchmark": table.benchmark,
    }


def _site_fold(run: RunFolder, fold: Fold) -> SiteFold:
    wanted = reported(run.config)
    test = score_record(run, wanted)["all"]
    chosen = best(run.records("evaluation"), run.config.select, fold.metric)["validation"].values()
    validation = sum(site["accuracy"] for site in chosen) / len(chosen)
    return SiteFold(fold.unseen, test["accuracy"], test["images"], validation, fold.uncovered, run.path.name)


def _expected(folds: list[SiteFold]) -> Expected:
    return expect({one.site: one.accuracy for one in folds}, {one.site: one.images for one in folds})


def _names_groups(config: Config, table: Table) -> bool:
    """Groups in a manifest are the user's own words; those of a benchmark's file names leave its protocol as it is."""
    return table.group is not None and not expanded(config.data).is_dir()


def _say(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else print(text, file=sys.stderr, flush=True)

"""The whole fit: leave each site out in turn with each method, keep one, train it on all sites, calibrate.

    model = fit(Config(data="tiles", unseen="none"), "runs")                # one method
    model = fit([simple, other], "runs")                                    # simplest first: `fit/choose.py`
    model.about["expected"], model.about["choice"], model.predictor

Every training is a run folder below `runs`, named by its settings, so a killed fit is resumable, and folds that
`patchgen compare` or an earlier fit has trained are reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import expanded
from patchgen.common.progress import Progress, logger, print_once
from patchgen.common.reading import process_cache
from patchgen.common.text import duration
from patchgen.config import NO_DOMAIN, PRESETS, Config
from patchgen.data.table import Table, fingerprint, read_table
from patchgen.fit.budget import estimate, measure, within
from patchgen.fit.calibrate import calibrate, calibration_images
from patchgen.fit.choose import Choice, choose
from patchgen.fit.expect import Expected, expect
from patchgen.fit.left_out import groups_of, predictions_at, right
from patchgen.fit.plan import Plan, check_models, check_readable, label_of
from patchgen.methods import method_class
from patchgen.predict.card import comparison_sentence
from patchgen.predict.model_folder import Model, backbone_facts
from patchgen.predict.predictor import Checkpoint, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.precision import AUTO, choose_precision
from patchgen.runs.scores import best, score_record
from patchgen.runs.tensors import load_tensors
from patchgen.tasks import Fold, make_fold
from patchgen.train.lifecycle import train
from patchgen.train.tokens import stored_tokens
from patchgen.train.track import make_tracker

QUICK_FROM = 5 * 60  # seconds: longer fits begin with a quick model
LONG = 15 * 60  # seconds: longer ones name the ways to shorten them


@dataclass(frozen=True)
class SiteFold:
    """The result of a model at the site that it was trained without."""

    site: str
    accuracy: float
    images: int
    validation: float  # mean accuracy on the held-out parts of its training sites
    uncovered: list[str]  # classes that only this site has, which cannot be learned from the others
    run: str
    method: str
    confidence: list[float]  # 21 quantiles of the largest probability there, before calibration


class Clock:
    """Estimates the remaining time of a fit from the trainings so far."""

    def __init__(self, work: list[int], say: Callable[[str], None]) -> None:
        self.work, self.say, self.done = work, say, 0
        self.seconds, self.trained = 0.0, 0

    @contextmanager
    def training(self, title: str, finished: bool = False) -> Iterator[None]:
        """Announce a training and measure its time."""
        number, left = self.done, ""
        if self.trained:
            minutes = self.seconds / self.trained * sum(self.work[number:]) / 60
            left = f"; about {minutes:.0f} min left" if minutes >= 1 else "; less than a minute left"
        note = "; finished earlier" if finished else left
        self.say(f"training {number + 1} of {len(self.work)}: {title}{note}")
        start = time.monotonic()
        yield
        self.done += 1
        seconds = time.monotonic() - start
        if seconds > 1 and not finished:  # trainings that are only looked up do not count
            self.seconds, self.trained = self.seconds + seconds, self.trained + self.work[number]


def fit(
    configs: Config | Sequence[Config],
    runs: str | Path,
    *,
    expecting: bool = True,
    split_given: bool = True,
    quiet: bool = False,
    track: str | bool = False,
    minutes: float | None = None,
    fixed: Iterable[str] = (),
    stop_at_quick: Callable[[str], bool] = lambda offer: False,
) -> Model:
    """Train a deployable model.

    Args:
        configs: Settings of one method, or of several, simplest first: the better one at left-out sites is
            selected. With `unseen` "none" the model is trained on all sites, after each was left out once
            (`expecting`); with a site's name it is trained without that site and scored on it.
        runs: Parent of the run folders.
        split_given: False if the user did not set `config.split`: it then depends on the groups of a manifest.
        track: Log every training to `tensorboard` (or True), `wandb` or `mlflow`.
        minutes: Choose methods, steps and image size such that the fit ends in this time.
        fixed: Names of settings that `minutes` must not change.
        stop_at_quick: Called with a sentence when a long fit has its quick model; True returns that one.

    Raises:
        ValueError: invalid settings or data, detected before the first training if possible.
    """
    if track:
        make_tracker(track)  # raises now if the extra is missing
    with print_once(), process_cache():
        plan = _plan([configs] if isinstance(configs, Config) else list(configs), runs, expecting, split_given, quiet)
        if minutes is None:
            plan.announce()
        if minutes is not None or not plan.all_finished:
            check_models(plan)
            plan, seconds = _budget(plan, minutes, frozenset(fixed))
            check_readable(plan)
            if minutes is None and seconds > QUICK_FROM and not quiet and (quick := _quick_plan(plan)):
                model = _quick_look(quick, plan, seconds, stop_at_quick, track)
                if model is not None:
                    return model
        return _run(plan, track)


def _budget(plan: Plan, minutes: float | None, fixed: frozenset[str]) -> tuple[Plan, float]:
    """Say what the plan costs; with `minutes`, change it to end in time."""
    if plan.quiet and minutes is None:
        return plan, 0.0
    rates = {label: measure(config, plan.final.classes) for label, config in plan.candidates.items()}
    if minutes is not None:
        plan, note = within(plan, rates, minutes, fixed)
        plan = _settled(plan)
        rates = {label: measure(config, plan.final.classes) for label, config in plan.candidates.items()}
        plan.say(f"to end within {minutes:g} min: {note}")
        plan.announce()
    seconds = estimate(plan, rates)
    plan.say(f"this will take about {duration(seconds)}, measured on a few steps")
    if minutes is None and seconds > LONG:
        plan.say("shorter: --quick for a first model in some minutes, --minutes 20 for what fits into that time")
    return plan, seconds


def _quick_plan(plan: Plan) -> Plan | None:
    """The last method with the quick settings; None if the plan is quick already, or cannot be."""
    config = next((c for c in reversed(plan.candidates.values()) if method_class(c.method).pool != "select"), None)
    if config is None or not plan.sites or "upper-layernorm" in (config.tune, method_class(config.method).tune):
        return None
    try:
        quick = replace(config, **{**PRESETS["quick"], "swad": False})
        quick_plan = _settled(replace(plan, candidates={label_of(quick): quick}))
        check_models(quick_plan)
    except ValueError:  # such as a convolutional network, or another patch size
        return None
    return quick_plan


def _quick_look(
    quick: Plan, plan: Plan, seconds: float, stop: Callable[[str], bool], track: str | bool
) -> Model | None:
    """Train the quick model at left-out sites, and finish it if the user wants no more than that."""
    plan.say("a quick model first")
    folds = _leave_out(quick, quick.first, Clock([len(fold.train) for fold in quick.sites.values()], plan.say), track)
    offer = (
        f"quick model: {_expected(folds).mean:.2f} expected at a new site; "
        f"the full training takes about {duration(seconds)}"
    )
    plan.say(offer)
    return _run(quick, track) if stop(offer) else None


def _run(plan: Plan, track: str | bool) -> Model:
    """All trainings of a plan, and its model."""
    work = [len(fold.train) for *_, fold in plan.left_out] + [len(plan.final.train)]
    clock = Clock(work, plan.say)
    scored = {label: _leave_out(plan, config, clock, track) for label, config in plan.candidates.items()}
    choice = _choose(plan, scored) if len(scored) > 1 else None
    selected = choice.chosen if choice else next(iter(scored))
    config, final = plan.candidates[selected], plan.final
    title = f"without {final.unseen}, to be scored on it" if final.test else "on all sites"
    with clock.training(plan.title(config, title), plan.is_finished(config)):
        run = train(config, plan.runs, plan.table, quiet=plan.quiet, track=track)
    if final.test:
        folds = [_site_fold(run, final)]
    else:
        labels = choice.counted if choice else [selected] * len(plan.sites)
        folds = [scored[label][i] for i, label in enumerate(labels)]
    return finish(run, final, folds, plan.quiet, choice)


def _plan(candidates: list[Config], runs: str | Path, expecting: bool, split_given: bool, quiet: bool) -> Plan:
    """Read the data and make every fold; raises ValueError for settings or data that cannot be used."""
    config = candidates[0]
    if config.task != "mdg":
        raise ValueError(f"fit trains classifiers for unseen sites, task 'mdg', not {config.task!r}")
    table = read_table(config.data, benchmark=config.benchmark, options=config.options)
    if config.unseen == NO_DOMAIN and NO_DOMAIN in table.domains:
        raise ValueError(f"a site is called {NO_DOMAIN!r}, which here means that no site is left out; rename it")
    say = _say(quiet)
    named = table.group is not None and not expanded(config.data).is_dir()  # not by a benchmark's file names
    if not split_given and named:
        say("patients stay together: --split group, because the manifest names groups")
        candidates = [replace(one, split="group") for one in candidates]
        config = candidates[0]
    final = make_fold(config, table)
    for note in final.notes:
        say(f"data: {note}")
    left_out = list(table.domains) if expecting and not final.test else []
    if len(table.domains) == 1:
        say(f"one site, {table.domains[0]}: no accuracy at a new site can be estimated without a second one")
        left_out, candidates = [], candidates[-1:]
    if len(candidates) > 1 and not left_out:
        raise ValueError(
            f"methods are compared at sites that are left out in turn, and here none is (--unseen or --no-expect): "
            f"name one method, such as --method {label_of(candidates[-1])}"
        )
    sites = {site: make_fold(replace(config, unseen=site), table) for site in left_out}
    return _settled(Plan({label_of(one): one for one in candidates}, table, Path(runs), final, sites, say, quiet))


def _settled(plan: Plan) -> Plan:
    """The plan with `--precision auto` resolved: one for all trainings of a fit."""
    if plan.first.precision != AUTO:
        return plan
    sites = (plan.first.unseen, *plan.sites)
    every = [replace(config, unseen=site) for config in plan.candidates.values() for site in sites]
    precision = choose_precision(every, plan.runs, fingerprint(plan.table))
    plan.say(f"precision: {precision}, by `auto`")
    return replace(plan, candidates={label: replace(c, precision=precision) for label, c in plan.candidates.items()})


def _leave_out(plan: Plan, config: Config, clock: Clock, track: str | bool) -> list[SiteFold]:
    """Each site left out with one method."""
    folds = []
    for site, fold in plan.sites.items():
        own = replace(config, unseen=site)
        with clock.training(plan.title(config, f"without {site}, to be scored on it"), plan.is_finished(own)):
            folds.append(_site_fold(train(own, plan.runs, plan.table, quiet=plan.quiet, track=track), fold))
    if folds and len(plan.candidates) > 1:
        plan.say(f"{label_of(config)} at left-out sites: {_expected(folds).mean:.3f} on average")
    return folds


def _choose(plan: Plan, scored: dict[str, list[SiteFold]]) -> Choice:
    """Compare the methods image by image, at the sites that were left out."""
    answers = {
        label: [
            right(predictions_at(RunFolder.open(plan.runs / result.run), fold, reported(plan.candidates[label])))
            for result, fold in zip(folds, plan.sites.values(), strict=True)
        ]
        for label, folds in scored.items()
    }
    choice = choose(answers, groups_of(list(plan.sites.values())))
    for one in choice.comparisons:
        plan.say(comparison_sentence(asdict(one), choice.images))
    return choice


def finish(
    run: RunFolder, fold: Fold, folds: list[SiteFold], quiet: bool = False, choice: Choice | None = None
) -> Model:
    """The model of a finished run, calibrated, with the facts for its card."""
    checkpoint = reported(run.config)
    predictor = load_run(run.path, checkpoint)
    whole = make_fold(replace(run.config, val_images=None), fold.table)  # every held-out image, not a sample of them
    store, model = predictor.store(fold.table.files), predictor.model
    tokens = None
    if model.reads_hidden and not run.config.augment:
        tokens = stored_tokens(model, run.config, fold.table, store, predictor.device, quiet)
    _say(quiet)(f"calibrating confidence on {calibration_images(whole):,} images of the training sites")
    with Progress("calibrating", calibration_images(whole), quiet=quiet) as bar:
        predictor.confidence, report = calibrate(predictor, whole, store, bar.tick, tokens)
    header = load_tensors(run.checkpoint(checkpoint))[1]
    scores = _expected(folds) if folds else None
    about: dict[str, Any] = {
        "data": data_facts(fold),
        "expected": asdict(scores) if scores else None,
        "folds": [asdict(one) for one in folds],
        "choice": choice_facts(choice, list(fold.table.domains)) if choice else None,
        "calibration": asdict(report),
        "backbone": backbone_facts(predictor, header["backbone"]),
        "run": run.path.name,
        "checkpoint": checkpoint,
    }
    return Model(predictor, about)


def choice_facts(choice: Choice, sites: list[str]) -> dict[str, Any]:
    """The facts about the comparison of methods for the card."""
    by_site = {name: dict(zip(sites, values, strict=True)) for name, values in choice.accuracy.items()}
    return {**asdict(choice), "accuracy": by_site, "counted": dict(zip(sites, choice.counted, strict=True))}


def reported(config: Config) -> Checkpoint:
    """The checkpoint to use: the weight average if SWAD was requested."""
    return "swad" if config.swad else "selected"


def data_facts(fold: Fold) -> dict[str, Any]:
    """The facts about the images for the card: names and counts, no path."""
    table: Table = fold.table
    return {
        "sites": list(table.domains),
        "counts": table.counts(),
        "unseen": fold.unseen if fold.test else None,
        "trained_on": sum(len(rows) for rows in fold.train.values()),
        "groups": len(set(table.group)) if table.group else None,
        "split": fold.splits.rule,
        "weighted": fold.sample_weights() is not None,
        "benchmark": table.benchmark,
    }


def _site_fold(run: RunFolder, fold: Fold) -> SiteFold:
    wanted = reported(run.config)
    test = score_record(run, wanted)["all"]
    chosen = best(run.records("evaluation"), run.config.select, fold.metric)["validation"].values()
    validation = sum(site["accuracy"] for site in chosen) / len(chosen)
    confidence = np.quantile(predictions_at(run, fold, wanted).probabilities.max(1), np.linspace(0, 1, 21))
    return SiteFold(
        fold.unseen, test["accuracy"], test["images"], validation, fold.uncovered, run.path.name,
        label_of(run.config), confidence.astype(float).round(6).tolist(),
    )  # fmt: skip


def _expected(folds: list[SiteFold]) -> Expected:
    return expect({one.site: one.accuracy for one in folds}, {one.site: one.images for one in folds})


def _say(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else logger.info(text)

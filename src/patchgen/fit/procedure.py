"""The whole fit: leave each site out in turn with each method, keep one, train it on all sites, calibrate.

Every training is a run folder below `runs`, named by its settings: a killed fit is resumable, and folds that `patchgen
compare` or an earlier fit has trained are reused.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import expanded
from patchgen.common.progress import Progress, logger, print_once
from patchgen.common.text import duration
from patchgen.config import NO_DOMAIN, PRESETS, Config
from patchgen.data.table import fingerprint, read_table
from patchgen.fit.calibrate import calibrate, calibration_images
from patchgen.fit.expect import Choice, Expected, choose, expect
from patchgen.fit.plan import Plan, check_models, check_readable, estimate, label_of, measure, within
from patchgen.methods import method_class
from patchgen.predict.card import comparison_sentence
from patchgen.predict.fold_runs import predictions_at, rows_of
from patchgen.predict.model_folder import Model, backbone_facts
from patchgen.predict.predictor import Checkpoint, load_run
from patchgen.runs.folder import AUTO, RunFolder, choose_precision
from patchgen.runs.scores import best, score_record
from patchgen.runs.tensors import load_tensors
from patchgen.tasks import Fold, make_fold
from patchgen.train.lifecycle import train
from patchgen.train.tokens import stored_tokens
from patchgen.train.track import make_tracker

QUICK_FROM = 5 * 60  # seconds: longer fits begin with a quick model
LONG = 15 * 60  # seconds: longer ones name the ways to shorten them


def fit(
    configs: Config | Sequence[Config], runs: str | Path, *, expecting: bool = True, split_given: bool = True,
    quiet: bool = False, track: str | bool = False, minutes: float | None = None, fixed: Iterable[str] = (),
    stop_at_quick: Callable[[str], bool] = lambda offer: False,
) -> Model:  # fmt: skip
    """Train a deployable model; ValueError for settings or data that cannot be used, before the first training.

    Several `configs`, simplest first, are compared at left-out sites. With a site as `unseen` the model is trained
    without it and scored on it. Without `split_given`, the groups of a manifest decide; `minutes` changes nothing in
    `fixed`; `stop_at_quick` gets a sentence when a long fit has its quick model, and True returns that one.
    """
    if track:
        make_tracker(track)  # raises now if the extra is missing
    candidates = [configs] if isinstance(configs, Config) else list(configs)
    with print_once():
        plan = replace(_plan(candidates, runs, expecting, split_given, quiet), track=track)
        if minutes is None:
            plan.announce()
        if minutes is not None or plan.finished <= len(plan.left_out):
            check_models(plan)
            plan, seconds = _budget(plan, minutes, frozenset(fixed))
            check_readable(plan)
            if minutes is None and seconds > QUICK_FROM and not quiet and (quick := _quick_plan(plan)):
                plan.say("a quick model first")
                folds = _leave_out(quick, quick.first, Clock(quick))
                offer = f"quick model: {_expected(folds).mean:.2f} expected at a new site; the full training takes"
                offer += f" about {duration(seconds)}"
                plan.say(offer)
                plan = quick if stop_at_quick(offer) else plan
        return _run(plan)


def _plan(candidates: list[Config], runs: str | Path, expecting: bool, split_given: bool, quiet: bool) -> Plan:
    """Read the data and make every fold; raises ValueError for settings or data that cannot be used."""
    config = candidates[0]
    if config.task != "mdg":
        raise ValueError(f"fit trains classifiers for unseen sites, task 'mdg', not {config.task!r}")
    table = read_table(config.data, benchmark=config.benchmark, options=config.options)
    if config.unseen == NO_DOMAIN and NO_DOMAIN in table.domains:
        raise ValueError(f"a site is called {NO_DOMAIN!r}, which here means that no site is left out; rename it")
    say = _say(quiet)
    if not split_given and table.group is not None and not expanded(config.data).is_dir():  # groups of a manifest
        say("patients stay together: --split group, because the manifest names groups")
        candidates = [replace(candidate, split="group") for candidate in candidates]
        config = candidates[0]
    final = make_fold(config, table)
    for note in final.notes:
        say(f"data: {note}")
    left_out = list(table.domains) if expecting and not final.test else []
    if len(table.domains) == 1:
        say(f"one site, {table.domains[0]}: no accuracy at a new site can be estimated without a second one")
        left_out, candidates = [], candidates[-1:]
    if len(candidates) > 1 and not left_out:
        raise ValueError("methods are compared at sites that are left out in turn, and here none is (--unseen or "
                         f"--no-expect): name one, such as --method {label_of(candidates[-1])}")  # fmt: skip
    sites = {site: make_fold(replace(config, unseen=site), table) for site in left_out}
    labelled = {label_of(candidate): candidate for candidate in candidates}
    return _with_precision(Plan(labelled, table, Path(runs), final, sites, say, quiet))


def _say(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else logger.info(text)


def _with_precision(plan: Plan) -> Plan:
    """The plan with `--precision auto` resolved: one for all trainings of a fit."""
    if plan.first.precision != AUTO:
        return plan
    sites = (plan.first.unseen, *plan.sites)
    configs = [replace(config, unseen=site) for config in plan.candidates.values() for site in sites]
    precision = choose_precision(configs, plan.runs, fingerprint(plan.table))
    plan.say(f"precision: {precision}, by `auto`")
    return plan.changed(precision=precision)


def _budget(plan: Plan, minutes: float | None, fixed: frozenset[str]) -> tuple[Plan, float]:
    """Say what the plan costs; with `minutes`, change it to end in time."""
    if plan.quiet and minutes is None:
        return plan, 0.0
    rates = {label: measure(config, plan.final.classes) for label, config in plan.candidates.items()}
    if minutes is not None:
        plan, note = within(plan, rates, minutes, fixed)
        plan = _with_precision(plan)
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
        quick_plan = _with_precision(replace(plan, candidates={label_of(quick): quick}))
        check_models(quick_plan)
    except ValueError:  # such as a convolutional network, or another patch size
        return None
    return quick_plan


# Training


class Clock:
    """Trains the runs of a plan, and estimates the remaining time from those so far."""

    def __init__(self, plan: Plan) -> None:
        self.work = [len(fold.train) for *_, fold in plan.left_out] + [len(plan.final.train)]
        self.done, self.trained, self.seconds = 0, 0, 0.0

    def train(self, plan: Plan, config: Config, text: str) -> RunFolder:
        """Announce a training, and do it unless it is finished."""
        finished, note = plan.is_finished(config), ""
        if self.trained:
            note = f"; about {duration(self.seconds / self.trained * sum(self.work[self.done :]))} left"
        title = f"{label_of(config)} {text}" if len(plan.candidates) > 1 else text
        number = f"{self.done + 1} of {len(self.work)}"
        plan.say(f"training {number}: {title}{'; finished earlier' if finished else note}")
        start = time.monotonic()
        run = train(config, plan.runs, plan.table, quiet=plan.quiet, track=plan.track)
        seconds = time.monotonic() - start
        if seconds > 1 and not finished:  # trainings that are only looked up do not count
            self.seconds, self.trained = self.seconds + seconds, self.trained + self.work[self.done]
        self.done += 1
        return run


def _run(plan: Plan) -> Model:
    """All trainings of a plan, and its model."""
    clock, final = Clock(plan), plan.final
    scored = {label: _leave_out(plan, config, clock) for label, config in plan.candidates.items()}
    choice = _choose(plan, scored) if len(scored) > 1 else None
    selected = choice.chosen if choice else next(iter(scored))
    text = f"without {final.unseen}, to be scored on it" if final.test else "on all sites"
    run = clock.train(plan, plan.candidates[selected], text)
    if final.test:
        folds = [_site_fold(run, final)]
    else:
        counted = choice.counted if choice else dict.fromkeys(plan.sites, selected)
        folds = [scored[counted[site]][i] for i, site in enumerate(plan.sites)]
    return finish(run, final, folds, plan.quiet, choice)


def _leave_out(plan: Plan, config: Config, clock: Clock) -> list[dict[str, Any]]:
    """Each site left out with one method."""
    folds = []
    for site, fold in plan.sites.items():
        run = clock.train(plan, replace(config, unseen=site), f"without {site}, to be scored on it")
        folds.append(_site_fold(run, fold))
    if folds and len(plan.candidates) > 1:
        plan.say(f"{label_of(config)} at left-out sites: {_expected(folds).mean:.3f} on average")
    return folds


def _site_fold(run: RunFolder, fold: Fold) -> dict[str, Any]:
    """The result of a model at the site that it was trained without."""
    test = score_record(run, reported(run.config))["all"]
    selected = best(run.records("evaluation"), run.config.select, fold.metric)["validation"].values()
    confidence = predictions_at(run, fold, reported(run.config)).probabilities.max(1)
    return {
        "site": fold.unseen,
        "accuracy": test["accuracy"],
        "images": test["images"],
        "validation": sum(site["accuracy"] for site in selected) / len(selected),  # at the training sites
        "uncovered": fold.uncovered,  # classes that only this site has, which cannot be learned from the others
        "run": run.path.name,
        "method": label_of(run.config),
        "confidence": np.quantile(confidence, np.linspace(0, 1, 21)).astype(float).round(6).tolist(),  # uncalibrated
    }


def _expected(folds: list[dict[str, Any]]) -> Expected:
    return expect({fold["site"]: fold["accuracy"] for fold in folds}, {fold["site"]: fold["images"] for fold in folds})


def _choose(plan: Plan, scored: dict[str, list[dict[str, Any]]]) -> Choice:
    """Compare the methods image by image, at the sites that were left out."""
    right: dict[str, dict[str, np.ndarray]] = {label: {} for label in scored}
    for label, folds in scored.items():
        for fold in folds:
            run = RunFolder.open(plan.runs / fold["run"])
            saved = predictions_at(run, plan.sites[fold["site"]], reported(run.config))
            right[label][fold["site"]] = saved.probabilities.argmax(1) == saved.label
    group = np.array(plan.table.group)
    groups = {site: group[rows_of(fold)] for site, fold in plan.sites.items()} if plan.table.group else None
    choice = choose(right, groups)
    for comparison in choice.comparisons:
        plan.say(comparison_sentence(asdict(comparison), choice.images))
    return choice


def reported(config: Config) -> Checkpoint:
    """The checkpoint to use: the weight average if SWAD was requested."""
    return "swad" if config.swad else "selected"


def finish(
    run: RunFolder, fold: Fold, folds: list[dict[str, Any]], quiet: bool = False, choice: Choice | None = None
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
        predictor.confidence, calibration = calibrate(predictor, whole, store, bar.tick, tokens)
    header = load_tensors(run.checkpoint(checkpoint))[1]
    table = fold.table
    about: dict[str, Any] = {
        "data": {  # names and counts, no path
            "sites": list(table.domains),
            "counts": table.counts(),
            "unseen": fold.unseen if fold.test else None,
            "trained_on": sum(len(rows) for rows in fold.train.values()),
            "groups": len(set(table.group)) if table.group else None,
            "split": fold.splits.rule,
            "weighted": fold.sample_weights() is not None,
            "benchmark": table.benchmark,
        },
        "expected": asdict(_expected(folds)) if folds else None,
        "folds": folds,
        "choice": asdict(choice) if choice else None,
        "calibration": calibration,
        "backbone": backbone_facts(predictor, header["backbone"]),
        "run": run.path.name,
        "checkpoint": checkpoint,
    }
    return Model(predictor, about)

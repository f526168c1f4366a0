"""What a fit is going to do: its trainings, their cost, and the checks before the first one."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from patchgen.common.files import cache_dir, expanded
from patchgen.common.machine import use_threads
from patchgen.common.progress import Progress
from patchgen.config import PRESETS, Config
from patchgen.data.doctor import check_classes
from patchgen.data.image_files import list_files, skipped_line, visible_folders
from patchgen.data.images import BILINEAR, ImageStore
from patchgen.data.table import Table, fingerprint, is_result
from patchgen.fit import BEST
from patchgen.fit.calibrate import calibration_images
from patchgen.methods import make_method, method_class
from patchgen.methods.build import build_model
from patchgen.model.device import find_device
from patchgen.model.losses import cross_entropy
from patchgen.runs.folder import RunFolder, run_name
from patchgen.tasks import Fold

T = TypeVar("T")
LISTED = 50  # unreadable files that are named
FEWEST_STEPS = 60  # fewer train nothing useful: then the quick settings
LOADING = 1.5  # seconds of a training besides building the model: checkpoints, the records, the first batch
AUGMENTED = 1.1  # crops, flips and colours, relative to a step without them
SMALL_SIDE = 112  # larger images are scaled down to this; both 14 and 16 divide it


@dataclass(eq=False)
class Plan:
    """All trainings of a fit."""

    candidates: dict[str, Config]  # label -> settings of the training on all sites, simplest first
    table: Table
    runs: Path
    final: Fold
    sites: dict[str, Fold]  # the folds that leave each out, in table order; empty without an estimate for a new site
    say: Callable[[str], None]
    quiet: bool
    track: str | bool = False
    interpolation: str = BILINEAR  # expected by the backbone; set by `check_models`

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.table)

    def is_finished(self, config: Config) -> bool:
        return RunFolder(self.runs / run_name(config, self._fingerprint)).done

    @property
    def first(self) -> Config:
        return next(iter(self.candidates.values()))

    @property
    def left_out(self) -> list[tuple[str, Config, Fold]]:
        """The trainings that leave a site out, each with the label of its candidate."""
        pairs = itertools.product(self.candidates.items(), self.sites.items())
        return [(label, replace(config, unseen=site), fold) for (label, config), (site, fold) in pairs]

    @property
    def finished(self) -> int:
        """The number of finished trainings; the last one is of any of the methods."""
        last = any(self.is_finished(config) for config in self.candidates.values())
        return last + sum(self.is_finished(config) for _, config, _ in self.left_out)

    def changed(self, **settings: Any) -> "Plan":
        """The plan with other settings of all its trainings."""
        return replace(self, candidates={name: replace(c, **settings) for name, c in self.candidates.items()})

    def announce(self) -> None:
        """Print the number of trainings, how many are already finished, and where."""
        total, names = len(self.left_out) + 1, list(self.candidates)
        each = f" with each of {len(names)} methods ({', '.join(names)})" if len(names) > 1 else ""
        first = f"{len(self.sites)} sites left out in turn{each}, then " if self.sites else ""
        last = f"without {self.final.unseen}" if self.final.test else "on all sites"
        text = f"{first}{'the better one' if each else names[0]} {last}"
        done = self.finished or "none"
        self.say(f"{total} training{'s' * (total > 1)}: {text}; {done} finished in {self.runs.absolute()}")
        if expanded(self.first.data).is_dir():  # of which all files are used; a manifest lists its files
            if skipped := list_files(self.table.root).skipped:
                self.say(f"data: {skipped_line(skipped)}")
            if results := [folder.name for folder in visible_folders(self.table.root) if is_result(folder)]:
                self.say(f"data: ignored {', '.join(results)}: runs and models, not images of a site")
        for check in check_classes(self.table):
            if check.status == "warn":
                self.say(f"data: {check.name}: {check.detail}. {check.fix}")


def label_of(config: Config) -> str:
    """`lp-ln`, or `lp-ln@mean` if pool or tuning mode were set."""
    return "@".join(str(part) for part in (config.method, config.pool, config.tune) if part)


def check_models(plan: Plan) -> None:
    """Build each method's network once, to reject methods that do not fit the backbone or image size."""
    for config in plan.candidates.values():
        method = make_method(config)
        method.class_names = plan.final.classes
        method.use_sample_weights(plan.final.sample_weights())
        model = build_model(config, method, len(plan.final.classes), plan.say)
        plan.interpolation = model.backbone.interpolation


def check_readable(plan: Plan) -> None:
    """Decode every labelled image before the first training, once if the cache is on; ValueError lists the bad ones."""
    rows = np.flatnonzero(plan.table.label >= 0)
    cache = cache_dir() if plan.first.cache else None
    store = ImageStore(plan.table.files, plan.first.image_size, cache, interpolation=plan.interpolation)
    with Progress("reading images", len(rows), quiet=plan.quiet) as bar:
        bad = store.unreadable(rows, bar.tick)
    if bad:
        lines = [f"{len(bad):,} of {len(rows):,} images cannot be read; repair, replace or remove them (also from a "
                 "manifest):"]  # fmt: skip
        lines += [f"  {plan.table.paths[row]}: {error.reason}" for row, error in bad[:LISTED]]
        lines += [f"  and {len(bad) - LISTED:,} more"] if len(bad) > LISTED else []
        raise ValueError("\n".join(lines))


# Costs


@dataclass(frozen=True)
class Rate:
    """Measured seconds."""

    step: float  # per training image
    forward: float  # per image
    build: float  # per training
    lower: float = 0.0  # per image, once: tokens that are stored


def measure(config: Config, classes: tuple[str, ...]) -> Rate:
    """Time forward and backward passes on random pixels; what a method adds to them is small."""
    use_threads(config.threads)
    method = make_method(config)
    method.class_names = classes
    start = time.monotonic()
    model = build_model(config, method, len(classes))
    build = time.monotonic() - start
    device = find_device(config.accelerator)
    model.to(device)
    images = torch.randn(8, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(0))
    images, label = images.to(device), torch.arange(8, device=device) % len(classes)
    lower = 0.0
    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16-mixed"):
        if model.reads_hidden and not config.augment:
            with torch.no_grad():
                model.backbone.lower(images)
                lower, images = _seconds(lambda: model.backbone.lower(images))
        if model.has_mask:
            model.start(images)

        def step() -> None:
            loss = cross_entropy(model(images).logits, label)
            if loss.requires_grad:  # some methods train nothing
                torch.autograd.backward(loss)
            loss.item()  # waits for the device

        step()  # the first of a shape prepares kernels
        training = min(_seconds(step)[0] for _ in range(2))
        with torch.no_grad():
            forward, _ = _seconds(lambda: model(images).logits.sum().item())
    return Rate(training / 8 * (AUGMENTED if config.augment else 1), forward / 8, build + LOADING, lower / 8)


def _seconds(work: Callable[[], T]) -> tuple[float, T]:
    start = time.monotonic()
    result = work()
    return time.monotonic() - start, result


def estimate(plan: Plan, rates: Mapping[str, Rate]) -> float:
    """Seconds until the model is written, if nothing else runs on this machine."""
    label, config = list(plan.candidates.items())[-1]
    jobs = [*plan.left_out, (label, config, plan.final)]
    total = sum(training_seconds(job, fold, rates[each]) for each, job, fold in jobs if not plan.is_finished(job))
    return total + calibration_images(plan.final) * rates[label].forward + len(plan.table) * rates[label].lower


def training_seconds(config: Config, fold: Fold, rate: Rate) -> float:
    """Seconds of one run: start, steps, evaluations and tests."""
    steps = config.steps * config.batch_per_domain * len(fold.train)
    evaluations = ((config.steps - 1) // config.eval_every + 2) * sum(len(rows) for rows in fold.validation.values())
    masks = 2 if method_class(config.method).pool in ("patchgen", "patchgen-cls", "select") else 1  # the untrained too
    checkpoints = 2 if config.swad else 1
    tests = (masks + checkpoints - 1) * sum(len(rows) for rows in fold.test.values())
    trainings = len(fold.train) if config.select == "leave-one-out" else 1  # each of the others has a source less
    return trainings * (rate.build + steps * rate.step + (evaluations + tests) * rate.forward)


def within(plan: Plan, rates: Mapping[str, Rate], minutes: float, fixed: frozenset[str]) -> tuple[Plan, str]:
    """A plan that ends in time, and what was changed for it: never the settings in `fixed`."""
    seconds, notes = 60 * minutes, list[str]()
    if estimate(plan, rates) <= seconds:
        return plan, "nothing had to be changed"
    if len(plan.candidates) > 1 and "methods" not in fixed:
        label = BEST if BEST in plan.candidates else list(plan.candidates)[-1]
        plan = replace(plan, candidates={label: plan.candidates[label]})
        notes.append(f"{label} alone, nothing is compared")
        if estimate(plan, rates) <= seconds:
            return plan, "; ".join(notes)
    side = plan.first.image_size
    if side > SMALL_SIDE and "image_size" not in fixed:
        share = (SMALL_SIDE / side) ** 2
        rates = {name: replace(r, step=r.step * share, forward=r.forward * share) for name, r in rates.items()}
        plan = plan.changed(image_size=SMALL_SIDE)
        notes.append(f"{SMALL_SIDE} px")
    if "steps" not in fixed:
        steps = plan.first.steps
        while steps >= FEWEST_STEPS and estimate(plan.changed(steps=steps), rates) > seconds:
            steps = int(steps * 0.9)
        if steps >= FEWEST_STEPS:
            return plan.changed(steps=steps, eval_every=max(1, steps // 6)), "; ".join([*notes, f"{steps} steps"])
    if "tune" in fixed or any(config.pool == "select" for config in plan.candidates.values()):
        return plan, "; ".join([*notes, "even so it will take longer"])
    quick = {name: value for name, value in PRESETS["quick"].items() if name not in fixed}
    return plan.changed(**quick), "; ".join([*notes, "the quick settings"])

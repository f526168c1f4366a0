"""What a fit will cost, from a measured rate, and settings that fit into a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from patchgen.common.machine import use_threads
from patchgen.config import PRESETS, Config
from patchgen.fit import BEST
from patchgen.fit.calibrate import calibration_images
from patchgen.fit.plan import Plan
from patchgen.methods import make_method, method_class
from patchgen.methods.build import build_model
from patchgen.model.device import find_device
from patchgen.model.losses import cross_entropy
from patchgen.tasks import Fold

T = TypeVar("T")
FEWEST_STEPS = 60  # fewer train nothing useful: then the quick settings
LOADING = 1.5  # seconds of a training besides building the model: checkpoints, the records, the first batch
AUGMENTED = 1.1  # crops, flips and colours, relative to a step without them
SMALL_SIDE = 112  # larger images are scaled down to this; both 14 and 16 divide it


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
    """A plan that ends in time, as near to the one that was asked for as possible, and what was changed.

    Args:
        fixed: Settings that the user has named; they stay.
    """
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

"""What a training step of every method costs, as a multiple of LP+LN's.

    measure_methods(["coral", "patchgen"], "tiny", image_size=112)["methods"]["coral"]["ratio"]

All methods share one kind of backbone, one batch and one process on the CPU, and take their steps in turn, LP+LN before
each of them; processor seconds are compared. What is timed is the whole step as the trainer makes it: forward passes,
losses, gradients, the optimiser and what a method does behind it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import Method, make_method, method_class
from patchgen.methods.build import build_on
from patchgen.model.backbone import BACKBONES, load_backbone
from patchgen.model.classifier import Classifier, trained_tensors
from patchgen.train.optim import make_optimizer
from patchgen.train.step import PlainStep

BASELINE = "lp-ln"
DOMAINS, NUM_CLASSES = 3, 7
Report = Callable[[str], None]


@dataclass
class Runner:
    """One method with its model and optimiser, ready for steps."""

    method: Method
    model: Classifier
    optimizer: torch.optim.Optimizer
    number: int = 0

    def step(self, batch: Batch) -> float:
        """Processor seconds of one step: what it costs, whatever else the machine does meanwhile."""
        start = time.process_time()
        PlainStep(self.method, self.model, self.optimizer, batch, self.number).take()
        self.number += 1
        return time.process_time() - start


def measure_methods(
    names: Sequence[str],
    source: str = "dinov2-small",
    *,
    image_size: int = 112,
    per_domain: int = 8,
    repeats: int = 5,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Time the steps of the named methods; each line of `report` is one method.

    Args:
        source: what `load_backbone` takes; a named architecture gets random weights, which cost the same.
        per_domain: images of each of three domains in a step.
        repeats: timed pairs of steps, after one that warms up.
    """
    if repeats < 1 or per_domain < 2:
        raise ValueError(f"repeats must be at least 1 and per_domain at least 2, not {repeats} and {per_domain}")
    for name in names:
        method_class(name)
    batch, found = random_batch(per_domain, image_size), {}
    for name in names:
        mine, base = (make_runner(each, source, image_size) for each in (name, BASELINE))
        pairs = [(base.step(batch), mine.step(batch)) for _ in range(repeats + 1)][1:]
        ratios = sorted(own / theirs for theirs, own in pairs)
        found[name] = {
            "ratio": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
            "trained_parameters": sum(t.numel() for t in trained_tensors(mine.model).values()),
            "own_parameters": sum(p.numel() for p in mine.method.parameters()),
        }
        report(f"{name:<24} {found[name]['ratio']:.2f} x {BASELINE}")
    return {
        "backbone": source,
        "image_size": image_size,
        "per_domain": per_domain,
        "domains": DOMAINS,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "methods": found,
    }


def make_runner(name: str, source: str, image_size: int, **settings: Any) -> Runner:
    """A method on its own copy of the backbone, set up as the trainer does it."""
    config = Config(data="random", unseen="none", method=name, backbone=source, image_size=image_size, **settings)
    method = make_method(config)
    method.class_names = tuple(f"thing {chr(ord('a') + i)}" for i in range(NUM_CLASSES))
    named = source == "auto" or source in BACKBONES
    model = build_on(load_backbone(source, pretrained=not named, image_size=image_size), config, method, NUM_CLASSES)
    method.sources = tuple(range(DOMAINS))
    method.setup(model)
    return Runner(method, model, make_optimizer(model, config, method))


def random_batch(per_domain: int, image_size: int) -> Batch:
    index = torch.arange(per_domain * DOMAINS)
    images = torch.randn(len(index), 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    return Batch(images, index % NUM_CLASSES, index // per_domain, index)

"""Every method of the table: it learns an easy problem, and asks the device for no value in the midst of a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.common import trained_step
from patchgen.config import Config
from patchgen.data.loaders import Batch, DomainBatches
from patchgen.diagnose.cost import DOMAINS, random_batch
from patchgen.methods import METHODS, compared_methods
from patchgen.methods.build import load_trained
from patchgen.methods.method import by_domain
from patchgen.methods.mixup import mix
from patchgen.model.classifier import trained_tensors
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train

CLASSES, STEPS, SIZE = 3, 40, 28
NEAR = {"gestur": {"decay": 0.5}, "mtl": {"ema": 0.5}}  # averages that can follow forty steps
HARMLESS = {"irm": {"anneal": 1.0}, "vrex": {"anneal": 1.0}}  # before the penalty's full weight


def easy_batch(seed: int, per_domain: int = 9) -> Batch:
    """The class is a colour; the domain is the brightness."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(per_domain * DOMAINS)
    label, domain = index % CLASSES, index // per_domain
    images = 0.3 * torch.randn(len(index), 3, SIZE, SIZE, generator=generator) + 0.5 * domain[:, None, None, None]
    images[index, label] += 2.0
    return Batch(images, label, domain, index)


@pytest.mark.parametrize("name", compared_methods(["all"]))
def test_it_learns(name: str) -> None:
    torch.manual_seed(0)
    hparams = {**NEAR, **HARMLESS}.get(name, {})
    step = trained_step(name, "tiny", SIZE, lr=1e-2, steps=STEPS, hparams=hparams)
    for seed in range(STEPS):
        step(easy_batch(seed))
    if other := step.method.predicting(step.model):
        load_trained(step.model, other)
    held_out = easy_batch(1000)
    with torch.no_grad():
        found = step.model(held_out.image).logits.argmax(1)
    assert (found == held_out.label).float().mean() > 0.9


def test_all_leaves_out_upper_bounds_and_keeps_the_order() -> None:
    every = compared_methods(["all"])
    assert {"lp", "lp-ln", "patchgen", "gmdg"} <= set(every)
    assert not {name for name in every if METHODS[name].labels == "all" or METHODS[name].mask == "true"}
    assert compared_methods(["patchgen", "all"])[0] == "patchgen" and len(compared_methods(["all", "lp"])) == len(every)


# What a step waits for

OF_DOMAINS = ["irm", "vrex", "groupdro", "coral", "mmd", "mixup", "mldg", "fish", "arm", "mdsdi"]


def some_labels(**more: Any) -> Batch:
    """A batch of three domains, in which every other image has no label, as the task mdg_gcd has it."""
    batch = random_batch(12, 28)
    return replace(batch, label=torch.where(batch.index % 2 == 0, batch.label, -1), **more)


def after_a_step(name: str, batch: Batch) -> dict[str, Tensor]:
    torch.manual_seed(0)
    step = trained_step(name, "tiny", 28, lr=1e-2)
    step(batch)
    return trained_tensors(step.model)


@pytest.mark.parametrize("name", compared_methods(["all"]))
def test_a_step_asks_for_nothing(name: str, asks: Any) -> None:
    step = trained_step(name, "tiny", 28)
    with asks:
        step(some_labels(num_domains=DOMAINS))
    assert not asks.who


@pytest.mark.parametrize("name", OF_DOMAINS)
def test_a_batch_that_says_how_it_is_arranged_gives_the_same_step_bit_for_bit(name: str, asks: Any) -> None:
    told = after_a_step(name, some_labels(num_domains=DOMAINS))
    with asks:
        looked = after_a_step(name, some_labels())
    assert asks.who  # a look would be noticed
    assert told.keys() == looked.keys() and all(torch.equal(told[key], looked[key]) for key in told)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_a_batch_are_arranged_as_they_say(parts: int) -> None:
    rows = {0: np.arange(5), 2: np.arange(5, 7), 3: np.arange(7, 30)}
    batches = DomainBatches(None, np.zeros(30, dtype=int), rows, 8, 1, None)  # type: ignore[arg-type]
    for part in range(parts):
        batch = batches.at(3, part, parts, images=False)
        looked = by_domain(replace(batch, num_domains=None))
        assert [found.tolist() for found in by_domain(batch)] == [found.tolist() for found in looked]
        assert [batch.domain[found].unique().tolist() for found in by_domain(batch)] == [[0], [2], [3]]


def test_a_blended_batch_is_arranged_as_before() -> None:
    mixed = mix(some_labels(num_domains=DOMAINS), 0.2)
    assert mixed.num_domains == DOMAINS and mixed.draw is None


@pytest.mark.parametrize("settings", [{"micro_batch": 5}, {"tune": "full"}])
def test_the_trainers_own_steps_ask_for_nothing(
    settings: Any, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Any
) -> None:
    whole = FoldTrainer.take_step

    def watched(self: FoldTrainer, number: int) -> None:
        with asks:
            whole(self, number)

    monkeypatch.setattr(FoldTrainer, "take_step", watched)
    train(Config(**{**tiny_settings, "method": "patchgen+coral", **settings}), tmp_path, quiet=True)
    assert not asks.who

"""Every method of the table learns a problem that is easy in every domain, as its own `update` makes the steps."""

from __future__ import annotations

import pytest
import torch

from patchgen.data.loaders import Batch
from patchgen.diagnose.cost import DOMAINS, make_rival
from patchgen.methods import METHODS, compared_methods
from patchgen.methods.build import load_trained
from patchgen.model.backbone import load_architecture

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
    rival = make_rival(name, load_architecture("tiny"), SIZE, lr=1e-2, steps=STEPS, hparams=hparams)
    for step in range(STEPS):
        rival.step(easy_batch(step))
    if other := rival.method.predicting(rival.model):
        load_trained(rival.model, other)
    held_out = easy_batch(1000)
    with torch.no_grad():
        found = rival.model(held_out.image).logits.argmax(1)
    assert (found == held_out.label).float().mean() > 0.9


def test_all_leaves_out_upper_bounds_and_keeps_the_order() -> None:
    every = compared_methods(["all"])
    assert {"lp", "lp-ln", "patchgen", "gmdg"} <= set(every)
    assert not {name for name in every if METHODS[name].labels == "all" or METHODS[name].mask == "true"}
    assert compared_methods(["patchgen", "all"])[0] == "patchgen" and len(compared_methods(["all", "lp"])) == len(every)

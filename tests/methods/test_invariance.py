"""IRM and VREx: images without a label, and the moment of their full weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.invariance import Irm, Vrex, irm_penalty, scale_slope
from patchgen.model.classifier import Output
from patchgen.train.loop import make_optimizer, plain_step

LABEL = [0, 2, 2, 1, 0, 1, -1, 2, 1, 0, 0, 1]
DOMAIN = [0] * 4 + [2] * 4 + [3] * 4


def settings(method: str, **changes: Any) -> Config:
    return Config(data="photos", unseen="site_c", backbone="tiny", image_size=28, method=method, **changes)


def numbers() -> tuple[Tensor, Batch]:
    logits = 2 * torch.randn(len(LABEL), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(torch.empty(0), torch.tensor(LABEL), torch.tensor(DOMAIN), torch.arange(len(LABEL)))
    return logits, batch


def test_the_slope_is_that_of_the_labelled_images() -> None:
    logits, batch = numbers()
    scale = torch.ones((), requires_grad=True)
    loss = F.cross_entropy(logits.float() * scale, batch.label, ignore_index=-1)
    torch.testing.assert_close(scale_slope(logits, batch.label), *torch.autograd.grad(loss, scale))
    assert float(scale_slope(logits[:2], torch.tensor([-1, -1]))) == 0


@pytest.mark.parametrize("name", ["irm", "vrex"])
def test_weights_before_and_after_the_change(name: str) -> None:
    logits, batch = numbers()
    out = Output(logits, logits)
    parts = zip(logits.split(4), batch.label.split(4), strict=True)  # by domain
    risks = torch.stack([F.cross_entropy(part, label, ignore_index=-1) for part, label in parts])
    penalties = {"irm": float(irm_penalty(logits, batch)), "vrex": float(risks.var(correction=0))}
    method = make_method(settings(name, hparams={name: 7.0}))
    assert isinstance(method, Irm | Vrex) and method.change == 500  # of the field's 5001
    for full, weight in ((False, 1.0), (True, 7.0)):
        method.full = full
        found = method.losses(out, batch)
        assert list(found) == ["main", f"L_{name}"]
        assert float(found[f"L_{name}"]) == pytest.approx(weight * penalties[name], rel=1e-5)
        torch.testing.assert_close(found["main"], F.cross_entropy(logits.float(), batch.label, ignore_index=-1))


@pytest.mark.parametrize("name", ["irm", "vrex", "full+vrex"])
def test_the_change_comes_once_and_empties_the_optimiser(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, steps=10, hparams={"anneal": 0.25})
    optimizer = make_optimizer(s.model, s.method)
    ages, full = [], []
    for number in range(5):
        plain_step(s.method, s.model, optimizer, s.batch, number)
        ages.append({int(state["step"]) for state in optimizer.state.values()})
        full.append(s.method.full)
    assert full == [False, False, True, True, True]
    assert ages == [{1}, {2}, {1}, {2}, {3}]


def test_the_share_of_the_change() -> None:
    assert make_method(settings("irm", steps=5)).full  # less than a step: the full weight from the start
    assert make_method(settings("irm", steps=40, hparams={"anneal": 1.0})).change == 40  # never

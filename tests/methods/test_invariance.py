"""IRM, VREx and GroupDRO: penalties against loops and finite differences, and the moment of their full weight."""

from __future__ import annotations

import math
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
from patchgen.train.loop import plain_step
from patchgen.train.optim import make_optimizer

LABEL = [0, 2, 2, 1, 0, 1, -1, 2, 1, 0, 0, 1]
DOMAIN = [0] * 4 + [2] * 4 + [3] * 4


def settings(method: str, **changes: Any) -> Config:
    return Config(data="photos", unseen="site_c", backbone="tiny", image_size=28, method=method, **changes)


def numbers(seed: int = 0) -> tuple[Tensor, Batch]:
    logits = 2 * torch.randn(len(LABEL), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    batch = Batch(torch.empty(0), torch.tensor(LABEL), torch.tensor(DOMAIN), torch.arange(len(LABEL)))
    return logits, batch


def risk(logits: Tensor, rows: list[int]) -> float:
    """Mean cross-entropy of the labelled rows, with a loop."""
    each = []
    for i in rows:
        if LABEL[i] >= 0:
            p = [math.exp(float(value)) for value in logits[i]]
            each.append(-math.log(p[LABEL[i]] / sum(p)))
    return sum(each) / len(each)


def risks_of(logits: Tensor) -> list[float]:
    return [risk(logits, [i for i, e in enumerate(DOMAIN) if e == domain]) for domain in (0, 2, 3)]


def test_the_penalty_has_the_gradient_of_differentiating_twice() -> None:
    logits, batch = numbers()
    logits = logits.float().requires_grad_()
    penalty = irm_penalty(logits, batch)
    [found] = torch.autograd.grad(penalty, logits)
    scale, terms = torch.ones((), requires_grad=True), []
    for domain in (0, 2, 3):
        rows = torch.tensor([i for i, e in enumerate(DOMAIN) if e == domain])
        halves = [rows[::2], rows[1::2]]
        risks = [F.cross_entropy(logits[half] * scale, batch.label[half], ignore_index=-1) for half in halves]
        slopes = [torch.autograd.grad(value, scale, create_graph=True)[0] for value in risks]
        terms.append(slopes[0] * slopes[1])
    assert min(terms) < 0 < max(terms)  # a product, not a square
    torch.testing.assert_close(penalty, torch.stack(terms).mean())
    [wanted] = torch.autograd.grad(torch.stack(terms).mean(), logits)
    torch.testing.assert_close(found, wanted)
    assert float(scale_slope(logits[:2].detach(), torch.tensor([-1, -1]))) == 0


@pytest.mark.parametrize("name", ["irm", "vrex"])
def test_weights_before_and_after_the_change(name: str) -> None:
    logits, batch = numbers()
    out = Output(logits, logits)
    risks = risks_of(logits)
    mean = sum(risks) / 3
    unweighted = {
        "irm": float(irm_penalty(logits, batch)),
        "vrex": sum((value - mean) ** 2 for value in risks) / 3,
    }[name]
    method = make_method(settings(name, hparams={name: 7.0}))
    assert isinstance(method, Irm | Vrex) and method.change == 500  # of the field's 5001
    for full, weight in ((False, 1.0), (True, 7.0)):
        method.full = full
        found = method.losses(out, batch)
        assert list(found) == ["main", f"L_{name}"]
        assert float(found[f"L_{name}"]) == pytest.approx(weight * unweighted, rel=1e-5)
        assert float(found["main"]) == pytest.approx(risk(logits, list(range(len(LABEL)))), rel=1e-6)


@pytest.mark.parametrize("name", ["irm", "vrex", "full+vrex"])
def test_the_change_comes_once_and_empties_the_optimiser(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, steps=10, hparams={"anneal": 0.25})
    optimizer = make_optimizer(s.model, s.method.config, s.method)
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


def test_groupdro_follows_a_loop(scene: Callable[..., Any]) -> None:
    s = scene("groupdro", sources=(0, 2, 3), hparams={"groupdro": 0.5})
    q = [1.0, 1.0, 1.0]
    for seed in range(4):
        logits, batch = numbers(seed)
        found = s.method.losses(Output(logits, logits), batch)
        risks = risks_of(logits)
        q = [value * math.exp(0.5 * loss) for value, loss in zip(q, risks, strict=True)]
        q = [value / sum(q) for value in q]
        assert s.method.q.tolist() == pytest.approx(q, rel=1e-5)
        wanted = sum(value * loss for value, loss in zip(q, risks, strict=True))
        assert list(found) == ["main"] and float(found["main"]) == pytest.approx(wanted, rel=1e-5)
        assert not s.method.q.requires_grad
    assert max(q) - min(q) > 0.1
    assert list(s.method.state_dict()) == ["q"] and not list(s.method.parameters())

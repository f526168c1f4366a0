"""MTL and RSC: the head on [feature, embedding] in its long form, and the muted features, by loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.build import load_trained
from patchgen.methods.heads import kept_features
from patchgen.model.losses import cross_entropy


def long_form(s: Any, features: Tensor, embedding: Tensor) -> Tensor:
    """Logits of the head W on [x, e] (B, 2 D)."""
    wide = torch.cat([s.model.head.weight, s.method.shift.weight], 1)  # (C, 2 D)
    return torch.cat([features, embedding], 1) @ wide.T + s.model.head.bias


def test_embeddings_are_moving_averages(scene: Callable[..., Any]) -> None:
    s = scene("mtl", sources=(0, 2), hparams={"ema": 0.8})
    assert not s.method.embeddings().any()
    means = []
    for step in range(3):
        out = s.forward()
        s.method.losses(out, s.batch)
        means.append(torch.stack([out.features[:3].mean(0), out.features[3:].mean(0)]).detach())
        weights = [0.2 * 0.8 ** (step - i) for i in range(step + 1)]
        wanted = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
        torch.testing.assert_close(s.method.embeddings(), wanted)
        s.move()
    assert not torch.allclose(means[0], means[1])


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_losses_and_predictions_are_those_of_the_long_form(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}mtl", sources=(0, 2))
    s.move()
    out = s.forward()
    assert torch.equal(s.method.losses(out, s.batch)["main"], cross_entropy(out.logits, s.batch.label))  # W_2 is 0
    nn.init.normal_(s.method.shift.weight, std=0.1)
    found, e = s.method.losses(out, s.batch), s.method.embeddings()
    logits = long_form(s, out.features, e[[0, 0, 0, 1, 1, 1]])
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-3
    if first:
        p = logits.softmax(1)[range(6), [0, 2, 2, 1, 0, int(logits[5].argmax())]]
        torch.testing.assert_close(found["L_conf"], -p.mean())
    wanted, bias = long_form(s, out.features, e.mean(0).expand(6, -1)), s.model.head.bias.detach().clone()
    tensors = s.method.predicting(s.model)
    assert torch.equal(s.model.head.bias, bias)  # training goes on with its own
    load_trained(s.model, tensors)
    torch.testing.assert_close(s.forward().logits, wanted)
    assert not torch.allclose(s.model.head.bias, bias)


@pytest.mark.parametrize("name", ["mtl", "rsc", "domain-moments"])
def test_a_head_that_is_not_linear_is_refused(name: str, scene: Callable[..., Any]) -> None:
    s = scene("lp-ln")
    s.model.add_module("head", nn.Sequential(s.model.head))
    with pytest.raises(ValueError, match=f"method '{name}' needs a linear head.*uses Sequential"):
        make_method(Config("photos", "site_c", method=name)).setup(s.model)


# RSC


def kept_by_hand(x: Tensor, target: list[int], head: nn.Module, part: float, images: float) -> Tensor:
    def probability(row: Tensor, y: int) -> float:
        scores = [math.exp(float((w @ row + b).detach())) for w, b in zip(head.weight, head.bias, strict=True)]
        return scores[y] / sum(scores)

    muted, falls = [], []
    for row, y in zip(x.detach(), target, strict=True):
        leaf = row.clone().requires_grad_()
        [slope] = torch.autograd.grad((head.weight @ leaf + head.bias)[y], leaf)
        order = sorted(range(len(row)), key=lambda j: -float(slope[j]))
        keep = torch.ones(len(row))
        keep[order[: round(part * len(row))]] = 0
        muted.append(keep)
        falls.append(probability(row, y) - probability(row * keep, y))
    hit = sorted(range(len(x)), key=lambda i: -falls[i])[: round(images * len(x))]
    return torch.stack([muted[i] if i in hit else torch.ones(x.shape[1]) for i in range(len(x))])


@pytest.mark.parametrize(("part", "images"), [(0.3333, 0.3333), (0.5, 0.6), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_muting_equals_its_definition(part: float, images: float) -> None:
    torch.manual_seed(0)
    head, x, target = nn.Linear(9, 3), torch.randn(6, 9), [0, 2, 1, 1, 0, 2]
    kept = kept_features(x, torch.tensor(target), head, part, images)
    assert torch.equal(kept, kept_by_hand(x, target, head, part, images))
    assert int((kept == 0).sum()) == round(9 * part) * round(6 * images)
    assert not kept.requires_grad


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_loss_reads_the_muted_features(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}rsc", hparams={"rsc_features": 0.25, "rsc_samples": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    target = [0, 2, 2, 1, 0, int(out.logits[5].argmax())]
    kept = kept_by_hand(out.features, target, s.model.head, 0.25, 0.5)
    logits = s.model.head(out.features * kept)
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-4
    if first:
        p = logits.softmax(1)[range(6), [*target[:5], int(logits[5].argmax())]]
        torch.testing.assert_close(found["L_conf"], -p.mean())

"""MTL: the head on [feature, embedding] in its long form, the moving averages by loops, and the bias that predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.build import load_trained
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

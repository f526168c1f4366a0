"""MTL: the head on [feature, embedding] in its long form, the moving averages by loops, and the bias that predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.methods.build import load_trained
from patchgen.model.losses import cross_entropy


def with_sources(s: Any) -> Any:
    s.method.sources = (0, 2)
    torch.manual_seed(0)
    s.method.setup(s.model)
    return s


def move(s: Any) -> None:
    """As steps would: the model, and W_2, which starts at 0."""
    s.move()
    torch.nn.init.normal_(s.method.shift.weight, std=0.1)


def test_embeddings_are_moving_averages(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("mtl", hparams={"ema": 0.8}))
    assert not s.method.embeddings().any()
    means = []
    for _ in range(3):
        out = s.forward()
        s.method.losses(out, s.batch)
        means.append(torch.stack([out.features[:3].mean(0), out.features[3:].mean(0)]).detach())
        s.move()
    assert not torch.allclose(means[0], means[1])
    weights = [0.2 * 0.8 ** (2 - i) for i in range(3)]
    wanted = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    torch.testing.assert_close(s.method.embeddings(), wanted)


def test_the_first_batch_counts_in_full(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("mtl"))
    out = s.forward()
    s.method.losses(out, s.batch)
    torch.testing.assert_close(s.method.embeddings()[1], out.features[3:].mean(0).detach())


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_loss_is_that_of_the_long_form(first: str, scene: Callable[..., Any]) -> None:
    s = with_sources(scene(f"{first}mtl"))
    move(s)
    out = s.forward()
    found = s.method.losses(out, s.batch)
    e = s.method.embeddings()
    both = torch.stack([torch.cat([x, e[0 if i < 3 else 1]]) for i, x in enumerate(out.features)])  # (B, 2 D)
    wide = torch.cat([s.model.head.weight, s.method.shift.weight], 1)  # (C, 2 D)
    logits = both @ wide.T + s.model.head.bias
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-3
    if first:
        p = logits.softmax(1)[range(6), [0, 2, 2, 1, 0, int(logits[5].argmax())]]
        torch.testing.assert_close(found["L_conf"], -p.mean())


def test_it_starts_as_plain_cross_entropy(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("mtl"))
    out = s.forward()
    assert torch.equal(s.method.losses(out, s.batch)["main"], cross_entropy(out.logits, s.batch.label))


def test_the_shifted_bias_predicts_what_the_long_form_predicts(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("mtl"))
    move(s)
    s.method.losses(s.forward(), s.batch)
    out = s.forward()
    middle = s.method.embeddings().mean(0).expand(6, -1)
    wide = torch.cat([s.model.head.weight, s.method.shift.weight], 1)
    wanted = torch.cat([out.features, middle], 1) @ wide.T + s.model.head.bias
    bias = s.model.head.bias.detach().clone()
    tensors = s.method.predicting(s.model)
    assert torch.equal(s.model.head.bias, bias)  # training goes on with its own
    load_trained(s.model, tensors)
    torch.testing.assert_close(s.forward().logits, wanted)
    assert not torch.allclose(s.model.head.bias, bias)


def test_gradients_reach_the_model_and_the_second_half_of_the_head(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("mtl"))
    model, own = s.reached(s.method.losses(s.forward(), s.batch)["main"])
    assert {"head.weight", "head.bias"} < model and own == {"shift.weight"}
    assert s.method.rates() == [(s.method.shift, s.method.config.lr)]
    assert set(s.method.state_dict()) == {"shift.weight", "sums", "mass"}

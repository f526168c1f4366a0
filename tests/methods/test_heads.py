"""MTL and RSC: the head on [feature, embedding] in its long form, and the muted features."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.build import load_trained
from patchgen.methods.heads import kept_features
from patchgen.model.losses import cross_entropy, pseudo_labels


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


@pytest.mark.parametrize("name", ["mtl", "rsc", "domain-moments", "mdsdi"])
def test_a_head_that_is_not_linear_is_refused(name: str, scene: Callable[..., Any]) -> None:
    s, method = scene("lp-ln"), make_method(Config("photos", "site_c", method=name))
    s.model.add_module("head", nn.Sequential(s.model.head))
    with pytest.raises(ValueError, match=f"method '{name}' needs a linear head.*uses Sequential"):
        (method.extend if name == "mdsdi" else method.setup)(s.model)  # mDSDI replaces the head


# RSC


@pytest.mark.parametrize(("part", "images"), [(0.3333, 0.3333), (0.5, 0.6), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_the_shares_are_of_dimensions_and_images(part: float, images: float) -> None:
    kept = kept_features(torch.randn(6, 9), torch.tensor([0, 2, 1, 1, 0, 2]), nn.Linear(9, 3), part, images)
    assert int((kept == 0).sum()) == round(9 * part) * round(6 * images)
    assert not kept.requires_grad


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_loss_reads_the_muted_features(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}rsc", hparams={"rsc_features": 0.25, "rsc_samples": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    target = torch.tensor([0, 2, 2, 1, 0, int(out.logits[5].argmax())])
    kept = kept_features(out.features, target, s.model.head, 0.25, 0.5)
    logits = s.model.head(out.features * kept)
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-4
    if first:
        p = logits.softmax(1)[range(6), pseudo_labels(logits, s.batch.label)]
        torch.testing.assert_close(found["L_conf"], -p.mean())

"""Pools whose head reads two vectors: one linear layer on both equals the sum of two linear heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import Classifier
from patchgen.model.patchgen import PatchGen

SIZE = 56  # 4 x 4 patches of the tiny backbone


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def make(pool: str) -> Classifier:
    torch.manual_seed(0)
    return Classifier(load_backbone("tiny"), 3, image_size=SIZE, pool=pool).eval()


@pytest.mark.parametrize("pool", ["cls-mean", "patchgen-cls"])
def test_logits_are_the_sum_of_two_heads(pool: str, images: Tensor) -> None:
    model = make(pool)
    tokens, out, dim = model.backbone(images), model(images), model.backbone.dim
    if pool == "cls-mean":
        first, second = tokens.cls, tokens.patches.mean(1)
    else:
        assert isinstance(model.select, PatchGen)
        first, second = model.select(tokens.patches).selected, tokens.cls
    weight, bias = model.head.weight, model.head.bias
    torch.testing.assert_close(out.logits, first @ weight[:, :dim].T + second @ weight[:, dim:].T + bias)
    assert out.halves is not None
    torch.testing.assert_close(out.halves[0], first @ weight[:, :dim].T + bias)
    torch.testing.assert_close(out.halves[1], second @ weight[:, dim:].T + bias)


def test_the_class_token_is_the_same_whatever_the_mask(images: Tensor) -> None:
    model = make("patchgen-cls")
    none = torch.full((2, 16), 0.5)
    with_mask, without = model(images, mask=torch.ones(2, 16)), model(images, mask=none)
    assert with_mask.halves is not None and without.halves is not None
    torch.testing.assert_close(with_mask.halves[1], without.halves[1])
    assert not torch.allclose(with_mask.halves[0], without.halves[0])


@pytest.mark.parametrize(("name", "pool"), [("lp-ln", "cls-mean"), ("patchgen-cls", None)])
def test_each_vector_classifies_by_itself(name: str, pool: str | None, images: Tensor) -> None:
    config = Config("data", unseen="a", method=name, pool=pool, lambda_conf=0.0)  # type: ignore[arg-type]
    model, label = make(pool or name), torch.tensor([0, 2])
    batch = Batch(images, label, torch.zeros(2, dtype=torch.long), torch.arange(2))
    out = model(images)
    terms = make_method(config).losses(out, batch)
    assert out.halves is not None
    expected = F.cross_entropy(out.halves[0], label) + F.cross_entropy(out.halves[1], label)
    torch.testing.assert_close(terms["halves"], expected)
    torch.testing.assert_close(terms["main"], F.cross_entropy(out.logits, label))


def test_mask_losses_read_the_selected_half_alone(images: Tensor) -> None:
    config = Config("data", unseen="a", method="patchgen-cls", lambda_conf=1.0)
    model, label = make("patchgen-cls"), torch.tensor([0, 2])
    out = model(images)
    terms = make_method(config).losses(out, Batch(images, label, torch.zeros(2, dtype=torch.long), torch.arange(2)))
    assert out.halves is not None
    probability = out.halves[0].softmax(1)[torch.arange(2), label]
    torch.testing.assert_close(terms["L_conf"], -probability.mean())


def test_rho_starts_as_a_mean_or_as_a_convolution() -> None:
    tokens = torch.randn(3, 16, 64)
    mean, conv = PatchGen(64, 16), PatchGen(64, 16, rho_start="conv")
    torch.testing.assert_close(mean.rho, torch.full((64, 16), 1 / 16))
    reference = torch.nn.Conv1d(64, 64, 16, groups=64).weight  # its bound is 1 / sqrt(fan_in), fan_in = 16
    assert conv.rho.abs().max() <= 0.25 and reference.abs().max() <= 0.25
    assert abs(float(conv.rho.detach().std()) - float(reference.detach().std())) < 0.01
    mean.calibrate(tokens)
    wide = PatchGen(64, 16, spread=1.0)
    wide.calibrate(tokens)
    for module, spread in ((mean, 0.35), (wide, 1.0)):
        q, k, _ = module._heads(tokens)
        assert float(module._score(q, k).std()) == pytest.approx(spread, rel=1e-3)


def test_an_unknown_start_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="mean, conv.*'zero'"):
        PatchGen(64, 16, rho_start="zero")

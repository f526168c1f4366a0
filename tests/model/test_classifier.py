"""Backbone, pool and head together: what each pool reads, the two stages, and where gradients stop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import POOLS, Classifier
from patchgen.model.tuning import set_tuning

SIZE = 56  # 4 x 4 patches of the tiny backbone


def make(pool: str, tune: str = "head", image_size: int = SIZE, dropout: float = 0.0) -> Classifier:
    backbone = load_backbone("tiny")
    set_tuning(backbone, tune)
    torch.manual_seed(0)
    return Classifier(backbone, 3, image_size=image_size, pool=pool, dropout=dropout).eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool != "select"])  # which is one stage
def test_two_stages_equal_the_whole(pool: str, images: Tensor) -> None:
    model = make(pool)
    kept = model.read(images)
    whole, from_images, from_kept = model(images), model.classify(kept), model(kept)
    for a, b, c in zip(whole, from_images, from_kept, strict=True):
        assert (a is None) == (b is None) == (c is None)
        if a is not None:
            torch.testing.assert_close(a, b)  # tensors, or a pair of them
            torch.testing.assert_close(a, c)
    assert whole.logits.shape == (2, 3)


def test_plain_pools_are_the_head_on_cls_or_mean(images: Tensor) -> None:
    for pool in ("cls", "mean"):
        model = make(pool)
        tokens = model.backbone(images)
        expected = tokens.cls if pool == "cls" else torch.stack([image.mean(0) for image in tokens.patches])
        out = model(images)
        torch.testing.assert_close(out.features, expected)
        torch.testing.assert_close(out.logits, expected @ model.head.weight.T + model.head.bias)
        assert out.mask is None and out.complementary_logits is None and model.select is None


def test_patchgen_pool_is_the_module_on_the_patch_tokens(images: Tensor) -> None:
    model = make("patchgen")
    assert model.select is not None and model.grid == (4, 4)
    chosen = model.select(model.backbone(images).patches)
    out = model(images)
    torch.testing.assert_close(out.features, chosen.selected)
    torch.testing.assert_close(out.mask, chosen.mask)
    torch.testing.assert_close(out.logits, model.head(chosen.selected))
    torch.testing.assert_close(out.complementary_logits, model.head(chosen.complementary))


@pytest.mark.parametrize("pool", ["cls", "mean", "patchgen", "select"])
def test_features_are_those_behind_dropout_that_the_head_reads(pool: str, images: Tensor) -> None:
    """As in the releases, whose dropout ends the feature network: L-Reg, GMDG and the others see what is dropped."""
    model = make(pool, dropout=0.5)
    model.drop.train()
    out = model(images)
    assert 0.2 < float((out.features == 0).float().mean()) < 0.8
    torch.testing.assert_close(out.logits, model.head(out.features))
    model.drop.eval()
    assert not (model(images).features == 0).any()


def test_complementary_logits_carry_no_gradient(images: Tensor) -> None:
    model = make("patchgen", tune="layernorm")
    out = model(images)
    assert out.complementary_logits is not None and not out.complementary_logits.requires_grad
    assert out.logits.requires_grad and out.mask is not None and out.mask.requires_grad


def test_gradients_reach_what_is_tuned_and_nothing_else(images: Tensor) -> None:
    model = make("patchgen", tune="layernorm")
    model(images).logits.square().sum().backward()
    norms = {f"backbone.{n}" for n, m in model.backbone.named_modules() if isinstance(m, nn.LayerNorm)}
    for name, parameter in model.named_parameters():
        learns = not name.startswith("backbone.") or name.rsplit(".", 1)[0] in norms
        assert (parameter.grad is not None) == learns, name


def test_another_image_size_has_its_own_grid() -> None:
    model = make("patchgen", image_size=84)
    assert model.grid == (6, 6) and model.select is not None and model.select.rho.shape == (64, 36)


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(ValueError, match="pool must be one of cls, .*, select, not 'max'"):
        make("max")
    with pytest.raises(ValueError, match="multiples of the patch size 14"):
        make("patchgen", image_size=60)

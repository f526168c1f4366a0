"""Backbone, pool and head together: what each pool reads, the two stages, and where gradients stop."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import POOLS, Classifier
from patchgen.model.patchgen import PatchGen
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


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(ValueError, match="pool must be one of cls, .*, select, not 'max'"):
        make("max")


# Pools whose head reads two vectors


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

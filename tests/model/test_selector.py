"""The selection inside the backbone, against a pass that hands every block the whole biased attention mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.convert import Loaded, build
from patchgen.model.selector import SPREAD, Selector

SMALL = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
CONV = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 64], "depths": [1, 1, 1, 1]}
PLAIN = ("dinov2_with_registers", "vit", "vit_mae", "clip_vision_model", "resnet")
# without a class token, with rotary positions, with a bias of its own in attention
OTHERS = ("siglip_vision_model", "dinov3_vit", "beit")
SIDE = 4


def small(family: str = "vit") -> Backbone:
    """Six blocks, so that the early one is the second."""
    torch.manual_seed(0)
    sizes = CONV if family == "resnet" else SMALL | {"intermediate_size": 128}
    return Backbone(Loaded(build(family, sizes)), "small", "small")


def images_for(backbone: Backbone, count: int = 2) -> Tensor:
    side = SIDE * backbone.patch_size
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def started(backbone: Backbone) -> Selector:
    torch.manual_seed(2)
    selector = Selector(backbone)
    selector.start(selector(backbone, images_for(backbone, 6)).early)
    return selector


def slow_block(block: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
    normed, layer = block.layernorm_before(hidden), block.attention
    q, k, v = (
        part(normed).unflatten(-1, (2, 32)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    scores = q @ k.transpose(-1, -2) / 32**0.5 + (0 if bias is None else bias)
    hidden = hidden + layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.layernorm_after(hidden))


def slow(backbone: Backbone, selector: Selector, images: Tensor) -> tuple[Tensor, Tensor]:
    """CLS and m of a ViT, block by block, in float64, with attention written out and a (B, 1, T, T) mask."""
    model = backbone.model.double()
    hidden = model.embeddings(images.double())
    bias, mask = None, torch.empty(0)
    for number, block in enumerate(model.layers):
        if number == backbone.early_block:
            early = F.layer_norm(hidden[:, 1:], hidden.shape[-1:])
            query = early @ selector.query.weight.T.double() + selector.query.bias.double()
            key = early @ selector.key.weight.T.double() + selector.key.bias.double()
            scores = torch.einsum("bpd,bqd->bpq", query, key).mean(2) / math.sqrt(64)  # one head of 64
            mask = 1 / (1 + torch.exp(-(scores + selector.shift)))
            read = mask**2 / (mask**2).mean(1, keepdim=True)
            bias = torch.zeros(len(images), 1, hidden.shape[1], hidden.shape[1], dtype=torch.float64)
            bias[:, 0, 0, 1:] = read.log()
        hidden = slow_block(block, hidden, bias)
    return model.layernorm(hidden)[:, 0], mask


def test_the_class_token_is_that_of_the_slow_version() -> None:
    backbone = small()
    selector, images = started(backbone), images_for(backbone)
    found = selector(backbone, images)
    cls, mask = slow(backbone, selector, images)
    torch.testing.assert_close(found.mask.double(), mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.tokens.cls.double(), cls, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", [*PLAIN, *OTHERS])
def test_a_mask_that_selects_nothing_is_the_plain_backbone(family: str) -> None:
    backbone = small(family)
    selector, images = started(backbone), images_for(backbone)
    plain, exact = backbone(images).cls, {"rtol": 0, "atol": 0} if family in PLAIN else {}
    for level in (1.0, 0.5):
        given = selector(backbone, images, torch.full((2, SIDE**2), level))
        torch.testing.assert_close(given.tokens.cls, plain, **exact)
    assert (selector(backbone, images).tokens.cls - plain).abs().max() > 1e-4


@pytest.mark.parametrize("family", PLAIN)
def test_a_patch_that_is_left_out_counts_for_nothing(family: str) -> None:
    """Masks that differ only in how little the left-out patches have give the same class token."""
    backbone = small(family)
    selector, images = started(backbone), images_for(backbone)
    mask = torch.zeros(2, SIDE**2)
    mask[:, :5] = 1
    hard, nearly = (selector(backbone, images, m).tokens.cls for m in (mask, mask.clamp(min=1e-5)))
    torch.testing.assert_close(hard, nearly, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_mask_through_the_class_token() -> None:
    backbone = small()
    selector = started(backbone)
    selector(backbone, images_for(backbone)).tokens.cls.square()[:, :7].sum().backward()
    for name in ("query.weight", "key.weight", "shift"):
        gradient = selector.get_parameter(name).grad
        assert gradient is not None and gradient.abs().sum() > 0, name


def test_the_start_is_contrast() -> None:
    """Scores have mean 0 and the given deviation; one odd patch among equal ones scores highest."""
    backbone = load_backbone("tiny")
    torch.manual_seed(0)
    selector, early = Selector(backbone), torch.randn(16, 36, 64)
    early += 2 * torch.randn(16, 1, 64)  # what an image's patches share
    early[:, 7] -= early.mean(1) * 2
    selector.start(early)
    score = selector.score(early)
    torch.testing.assert_close(score.mean(), torch.tensor(0.0), rtol=0, atol=1e-4)
    torch.testing.assert_close(score.std(), torch.tensor(SPREAD), rtol=1e-3, atol=0)
    assert (score.argmax(1) == 7).float().mean() > 0.9


def test_the_level_changes_what_is_shown_and_nothing_else() -> None:
    backbone = load_backbone("tiny")
    selector, images = started(backbone), images_for(backbone)
    raw = selector(backbone, images)
    torch.testing.assert_close(raw.shown, raw.mask, rtol=0, atol=0)
    selector.level.copy_(torch.tensor([3.0, -1.0]))
    shown = selector(backbone, images)
    read = raw.mask**2 / (raw.mask**2).mean(1, keepdim=True)
    torch.testing.assert_close(shown.shown, torch.sigmoid(3 * read.log() - 1))
    torch.testing.assert_close(shown.mask, raw.mask, rtol=0, atol=0)
    torch.testing.assert_close(shown.tokens.cls, raw.tokens.cls, rtol=0, atol=0)


def test_memory_is_linear_in_the_patches() -> None:
    backbone = load_backbone("tiny")
    selector = Selector(backbone)

    def largest(side: int) -> int:
        """Elements of the largest tensor that is stored for the backward pass."""
        stored: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda part: stored.append(part) or part, lambda part: part)
        with hooks:
            selector(backbone, torch.randn(1, 3, side * 14, side * 14))
        return max(tensor.numel() for tensor in stored)

    assert largest(32) <= 4.2 * largest(16)  # 1024 and 256 patches


def test_a_backbone_without_fused_attention_is_refused_in_words() -> None:
    backbone = small("beit")
    backbone.model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="needs a vision transformer with fused attention.*patchgen-attend"):
        Selector(backbone)


def test_a_network_without_class_token_is_read_by_the_weighted_mean() -> None:
    backbone = small("resnet")
    selector, images = started(backbone), images_for(backbone)
    found, tokens = selector(backbone, images), backbone(images).patches
    read = found.mask**2 / (found.mask**2).mean(1, keepdim=True)
    expected = torch.stack([(r[:, None] * t).mean(0) for r, t in zip(read, tokens, strict=True)])
    torch.testing.assert_close(found.tokens.cls, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", [{"block": 3}, {"everywhere": 1}], ids=str)
def test_where_the_selection_acts(choice: dict[str, float]) -> None:
    """The mask is scored a block later, or patches read it too: the class token is another one."""
    from patchgen.config import Config
    from patchgen.methods import make_method
    from patchgen.methods.build import build_on

    found = []
    for hparams in ({}, choice):
        config = Config(data="", unseen="", method="ablation-select", image_size=64, hparams=hparams)
        model = build_on(backbone := small(), config, make_method(config), 3)
        model.start(images_for(backbone))
        found.append(model(images_for(backbone)).features)
    assert (found[0] - found[1]).abs().max() > 1e-5

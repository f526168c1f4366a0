"""Prompts against a sequence built by hand, for every family of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.ccd.mixture import SphericalMixture
from patchgen.ccd.model import check_promptable, prompted
from patchgen.ccd.pool import MixturePool
from patchgen.ccd.settings import StreamConfig
from patchgen.model.backbone import Backbone
from patchgen.model.convert import Loaded, build
from patchgen.model.generic import FAMILIES, build_generic

VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
SMALL: dict[str, dict[str, Any]] = {
    "dinov2": VIT,
    "dinov2_with_registers": VIT,
    "vit": VIT | {"intermediate_size": 64},
    "vit_mae": VIT | {"intermediate_size": 64},
    "clip_vision_model": VIT | {"intermediate_size": 64},
    "dinov3_vit": VIT | {"intermediate_size": 64, "num_register_tokens": 3},  # rotary positions
    "siglip_vision_model": VIT | {"intermediate_size": 64},  # no CLS
    "ijepa": VIT | {"intermediate_size": 64},  # no CLS
}
RELATIVE = VIT | {"intermediate_size": 64, "use_mean_pooling": False, "use_relative_position_bias": True}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(family: str) -> Backbone:
    return drawn(SMALL[family], family)


def drawn(settings: dict[str, Any], family: str) -> Backbone:
    model = (build if family in FAMILIES else build_generic)(family, settings)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=i) * 0.2)
    return Backbone(Loaded(model), "small", "small")


def test_the_prompts_of_an_image_are_the_means_of_its_likeliest_components() -> None:
    pool = MixturePool(StreamConfig("birds", prompts=2), known=2)
    pool.mixture = SphericalMixture(torch.eye(4) * 0.9, torch.full((4,), 0.1), torch.full((4,), 0.25))
    query = torch.tensor([[30.0, 20.0, 10.0, 0.0], [0.0, 1.0, 0.0, 2.0]])  # far from unit length
    prompts = pool.prompts(pool.likely(query.to(torch.bfloat16)))
    assert not prompts.requires_grad
    torch.testing.assert_close(prompts, 0.9 * torch.eye(4)[torch.tensor([[0, 1], [3, 1]])])


@pytest.mark.parametrize("family", ["dinov2", "dinov2_with_registers"])
def test_prompts_stand_behind_cls_and_carry_its_position(family: str) -> None:
    backbone, images, prompts = small(family), draw(3, 3, 16, 16), draw(3, 5, 32, seed=1)
    model = backbone.model
    plain = model.embeddings(images)  # (B, 1 + R + P, D), positions added
    placed = prompts + model.embeddings.position_embeddings[:, :1]
    hidden = torch.cat([plain[:, :1], placed, plain[:, 1:]], dim=1)
    for layer in model.encoder.layer:
        out = layer(hidden)
        hidden = out[0] if isinstance(out, tuple) else out
    hidden = model.layernorm(hidden)
    tokens = prompted(backbone, images, prompts)
    torch.testing.assert_close(tokens.cls, hidden[:, 0])
    torch.testing.assert_close(tokens.patches, hidden[:, -16:])


@pytest.mark.parametrize("family", ["siglip_vision_model", "ijepa"])
def test_without_cls_prompts_stand_in_front_and_all_patches_stay(family: str) -> None:
    backbone, images, prompts = small(family), draw(3, 3, 16, 16), draw(3, 5, 32, seed=1)
    model = backbone.model
    hidden = torch.cat([prompts, model.embeddings(images)], dim=1)
    for layer in model.get_submodule(backbone.family.blocks):
        hidden = layer(hidden) if family == "ijepa" else layer(hidden, attention_mask=None)
    hidden = model.get_submodule(backbone.family.final_norm)(hidden)
    tokens = prompted(backbone, images, prompts)
    torch.testing.assert_close(tokens.patches, hidden[:, -16:])
    torch.testing.assert_close(tokens.cls, hidden[:, -16:].mean(1))


def test_dinov3_turns_its_patches_as_without_prompts() -> None:
    """Blocks by hand: the rotation is that of the 16 patches, and prompts are not turned, as CLS is not."""
    backbone, images, prompts = small("dinov3_vit"), draw(2, 3, 16, 16), draw(2, 3, 32, seed=1)
    model, plain = backbone.model, backbone.model.embeddings(images)
    hidden = torch.cat([plain[:, :1], prompts, plain[:, 1:]], dim=1)
    turned = model.rope_embeddings(images)
    assert turned[0].shape[0] == 16
    for layer in model.get_submodule(backbone.family.blocks):
        hidden = layer(hidden, position_embeddings=turned)
    torch.testing.assert_close(prompted(backbone, images, prompts).patches, model.norm(hidden)[:, -16:])


@pytest.mark.parametrize("family", list(SMALL))
def test_every_transformer_takes_a_set_of_prompts_and_keeps_no_trace_of_it(family: str) -> None:
    backbone, state = small(family), torch.get_rng_state()
    images, prompts = draw(3, 3, 16, 16), draw(3, 5, 32, seed=1)
    before = backbone(images)
    check_promptable(backbone)
    during, flipped = prompted(backbone, images, prompts), prompted(backbone, images, prompts.flip(1))
    assert during.patches.shape == before.patches.shape == (3, 16, 32) and during.grid == (4, 4)
    assert not torch.allclose(during.cls, before.cls, atol=1e-4)
    torch.testing.assert_close(during.patches, flipped.patches)  # all share one position, so they are a set
    torch.testing.assert_close(prompted(backbone, images, prompts[:, :0]).cls, before.cls)
    after = backbone(images)
    assert torch.equal(after.cls, before.cls) and torch.equal(after.patches, before.patches)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["beit", "data2vec-vision"])
def test_relative_positions_are_refused_at_once(family: str) -> None:
    with pytest.raises(ValueError, match=rf"'small' \({family}\) takes none .*relative positions.*gcd\+patchgen"):
        check_promptable(drawn(RELATIVE, family))


def test_a_model_that_fails_or_hides_its_tokens_is_refused_in_words() -> None:
    conv = build("resnet", {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]})
    with pytest.raises(ValueError, match=r"'small' .*takes none .*gcd\+patchgen"):
        check_promptable(Backbone(Loaded(conv), "small", "small"))
    backbone = small("vit")
    backbone.model.get_submodule(backbone.family.blocks)[0].register_forward_pre_hook(only_its_own)
    with pytest.raises(ValueError, match=r"takes none \(RuntimeError: 17 tokens, not 19\)"):
        check_promptable(backbone)
    backbone.model.embeddings, backbone.model.stem = None, backbone.model.embeddings  # as timm's networks have none
    with pytest.raises(ValueError, match=r"'small' \(vit\) takes none .AttributeError"):
        check_promptable(backbone)


def only_its_own(block: Any, inputs: Any) -> None:
    if inputs[0].shape[1] != 17:
        raise RuntimeError(f"17 tokens, not {inputs[0].shape[1]}")

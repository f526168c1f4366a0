"""Every ranking against a slow, explicit computation: eager attention, central differences, loops."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

from benchmarks.memory import explicit_forward
from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.classifier import Classifier
from patchgen.model.convert import Loaded, build
from patchgen.model.tuning import attention_maps
from patchgen.predict.attribution import RANKINGS, available, check_rankings

SIZE, CLASSES = 56, 3  # 4 x 4 patches of 14
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 14,
    "image_size": SIZE,
}  # fmt: skip


def make(pool: str, backbone: Backbone | None = None) -> Classifier:
    """A classifier away from its start, in float64 so that central differences are exact enough."""
    torch.manual_seed(3)
    model = Classifier(backbone or load_backbone("tiny"), CLASSES, image_size=SIZE, pool=pool)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.3 if "select" in name else 0.05) * torch.randn_like(parameter))
    return model.double().eval()


def images(count: int = 3, size: int = SIZE) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)).double()


TARGET = torch.tensor([2, 0, 1])


def rank(name: str, model: Classifier, pixels: Tensor | None = None) -> Tensor:
    return RANKINGS[name](model, images() if pixels is None else pixels, TARGET)


def eager_attention(backbone: Backbone, pixels: Tensor) -> list[Tensor]:
    """What the same model of transformers says when its attention is not fused: (B,H,T,T) a block."""
    facts = backbone.model.config.to_diff_dict()
    kind = CONFIG_MAPPING[facts.pop("model_type")]
    model = AutoModel.from_config(kind(**facts), attn_implementation="eager").eval()
    model.load_state_dict(backbone.model.state_dict(), strict=False)
    if backbone.model_type == "vit_mae":
        model.config.mask_ratio = 0.0
    more: dict[str, Any] = {} if backbone.model_type.startswith("dinov2") else {"interpolate_pos_encoding": True}
    if backbone.model_type == "vit_mae":
        more["noise"] = torch.arange(16).expand(len(pixels), -1)
    return list(model(pixels, output_attentions=True, **more).attentions)


def queries_of(model: Classifier) -> list[int]:
    prefix = model.backbone.num_prefix_tokens
    return [0] if model.pool == "cls" else list(range(prefix, prefix + 16))


# Attention


@pytest.mark.parametrize("family", ["dinov2_with_registers", "vit", "vit_mae", "clip_vision_model"])
def test_attention_is_what_the_unfused_model_computes(family: str) -> None:
    config = {k: v for k, v in SMALL.items() if not (family.startswith("dinov2") and k == "intermediate_size")}
    torch.manual_seed(0)
    backbone = Backbone(Loaded(build(family, config)), "small", "small")
    with torch.no_grad():
        for parameter in backbone.parameters():  # transformers starts near zero, where all attention is flat
            parameter.add_(0.2 * torch.randn_like(parameter))
    pixels = images(2).float()
    expected = [each.mean(1) for each in eager_attention(backbone, pixels)]
    found = attention_maps(backbone, pixels)
    assert len(found) == 2 and float(expected[1].std()) > 1e-3
    for fast, slow in zip(found, expected, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(attention_maps(backbone, pixels, last=True)[0], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_rollout_by_loops(pool: str) -> None:
    model = make(pool)
    maps = [each.mean(1) for each in eager_attention(model.backbone, images())]
    prefix = model.backbone.num_prefix_tokens
    for b in range(3):
        first, second = ((each[b] + torch.eye(len(each[b]))) / 2 for each in maps)
        tokens = len(first)
        for p in range(16):
            paths = [
                sum(second[q, t].item() * first[t, prefix + p].item() for t in range(tokens)) for q in queries_of(model)
            ]
            assert float(rank("rollout", model)[b, p]) == pytest.approx(sum(paths) / len(paths), rel=1e-4)


# Gradients: central differences of the logit behind a block


def logit_behind(model: Classifier, hidden: Tensor, block: int) -> Tensor:
    """The target logits (B,) when `hidden` (B,T,D) enters a block."""
    for layer in model.backbone.model.encoder.layer[block:]:
        hidden = layer(hidden)
    hidden = model.backbone.model.layernorm(hidden)
    patches = hidden[:, model.backbone.num_prefix_tokens :]
    read = {"cls": hidden[:, 0], "mean": patches.mean(1), "patchgen": patches}[model.pool]
    return model.classify(read).logits.gather(1, TARGET[:, None])[:, 0]


def entering(model: Classifier, block: int) -> Tensor:
    hidden: Tensor = model.backbone.model.embeddings(images())
    for layer in model.backbone.model.encoder.layer[:block]:
        hidden = layer(hidden)
    return hidden


STEP = 1e-5


@torch.no_grad()
@pytest.mark.parametrize("pool", ["cls", "mean", "patchgen"])
def test_gradient_x_input_by_central_differences(pool: str) -> None:
    model = make(pool)
    hidden, prefix = entering(model, 0), model.backbone.num_prefix_tokens
    found = rank("gradient-x-input", model)
    for p in range(0, 16, 5):  # scale one token: the slope is <z, dlogit/dz>
        up, down = hidden.clone(), hidden.clone()
        up[:, prefix + p] *= 1 + STEP
        down[:, prefix + p] *= 1 - STEP
        slope = (logit_behind(model, up, 0) - logit_behind(model, down, 0)) / (2 * STEP)
        torch.testing.assert_close(found[:, p], slope, rtol=1e-3, atol=1e-6)
    assert float(found.std()) > 1e-5


@torch.no_grad()
@pytest.mark.parametrize("pool", ["cls", "mean", "patchgen"])
def test_grad_cam_by_central_differences(pool: str) -> None:
    model = make(pool)
    hidden, prefix = entering(model, 1), model.backbone.num_prefix_tokens
    weights = torch.zeros(3, hidden.shape[2], dtype=torch.float64)
    for d in range(hidden.shape[2]):  # shift one channel of all patches: the slope is the summed gradient
        up, down = hidden.clone(), hidden.clone()
        up[:, prefix:, d] += STEP
        down[:, prefix:, d] -= STEP
        weights[:, d] = (logit_behind(model, up, 1) - logit_behind(model, down, 1)) / (2 * STEP) / 16
    expected = (hidden[:, prefix:] * weights[:, None]).sum(2)
    torch.testing.assert_close(rank("grad-cam", model), expected, rtol=1e-3, atol=1e-6)


def test_a_ranking_leaves_no_hook_and_no_gradient_behind() -> None:
    model = make("patchgen")
    before = model(images()).logits
    for name in RANKINGS:
        assert rank(name, model).shape == (3, 16) and not rank(name, model).requires_grad
    torch.testing.assert_close(model(images()).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# The others


def test_mask_is_the_explicit_one() -> None:
    model = make("patchgen")
    assert model.select is not None
    expected = explicit_forward(model.select, model.read(images())).mask
    torch.testing.assert_close(rank("mask", model).double(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_random_depends_on_the_image_alone() -> None:
    model, pixels = make("cls"), images()
    together = rank("random", model, pixels)
    alone = RANKINGS["random"](model, pixels[1:2], TARGET[1:2])
    assert torch.equal(together[1:2], alone) and not torch.equal(together[0], together[1])
    assert torch.equal(together.sort(1).values, torch.arange(16.0).expand(3, -1))
    many = torch.rand(400, 3, 28, 28)
    places = RANKINGS["random"](model, many, TARGET).mean(0)  # 7.5 with a standard error of 4.6 / 20
    assert float((places - 7.5).abs().max()) < 5 * 4.61 / 20


def test_a_convolutional_net_has_gradients_but_no_attention() -> None:
    config = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
    torch.manual_seed(0)
    backbone = Backbone(Loaded(build("resnet", config)), "small", "small")
    model = Classifier(backbone, CLASSES, image_size=96, pool="mean").eval()
    assert available(model) == ("grad-cam", "gradient-x-input", "random", "centre")
    pixels = images(3, 96).float()
    # the head is linear in the mean of the map, so both are <z_p, W_target> / P
    expected = (backbone(pixels).patches * model.head.weight[TARGET][:, None]).sum(2) / 9
    for name in ("grad-cam", "gradient-x-input"):
        torch.testing.assert_close(rank(name, model, pixels), expected.detach(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="'attention'.*it has"):
        check_rankings(model, ("attention",), "resnet")
    selective = Classifier(backbone, CLASSES, image_size=96, pool="select").eval()
    selective.start(pixels)
    read = rank("mask", selective, pixels) ** 2
    weighed = (backbone(pixels).patches * selective.head.weight[TARGET][:, None]).sum(2) * read / read.sum(1, True)
    torch.testing.assert_close(rank("gradient-x-input", selective, pixels), weighed.detach(), rtol=1e-3, atol=1e-6)
    assert rank("grad-cam", selective, pixels).isfinite().all()


def test_missing_rankings_are_an_error_with_the_available_ones() -> None:
    model = make("cls")
    assert "mask" not in available(model) and "mask" in available(make("patchgen"))
    with pytest.raises(ValueError, match="lp-ln has no ranking 'mask'.*it has attention, rollout"):
        check_rankings(model, ("random", "mask"), "lp-ln")

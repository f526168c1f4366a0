"""The plain ViT against transformers: names, order, tokens and gradients are equal bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import images
from torch import Tensor, nn

from patchgen.model.backbone import load_backbone
from patchgen.model.tuning import set_tuning
from patchgen.model.vit import LAYOUTS, Vit, VitConfig

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
NARROW, GATED = {"intermediate_size": 96, "qkv_bias": False}, {"use_swiglu_ffn": True, "mlp_ratio": 3}
CLASSES = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters", "vit": "ViT", "vit_mae": "ViTMAE",
           "clip_vision_model": "CLIPVision"}  # fmt: skip
CASES = [
    ("dinov2", {}), ("dinov2", GATED), ("dinov2_with_registers", {}), ("dinov2_with_registers", GATED),
    ("vit", NARROW), ("vit_mae", NARROW), ("clip_vision_model", {"intermediate_size": 96}),
    ("clip_vision_model", {"intermediate_size": 96, "hidden_act": "gelu", "layer_norm_eps": 1e-3}),
]  # fmt: skip


def reference(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """The model of transformers with random weights, also where it starts with zeros and ones."""
    torch.manual_seed(seed)
    config = getattr(transformers, CLASSES[family] + "Config")(**SIZES, **changes)
    if family == "vit_mae":
        config.mask_ratio = 0.0
    model = getattr(transformers, CLASSES[family] + "Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def reference_tokens(model: Any, images: Tensor) -> Tensor:
    """(B, prefix + P, D) after the final norm."""
    family, more = model.config.model_type, {"interpolate_pos_encoding": True}
    if family.startswith("dinov2"):
        more = {}
    if family == "vit_mae":  # it sorts its patches by noise, even when none is masked
        more["noise"] = torch.arange(images.shape[2] * images.shape[3] / 16).expand(len(images), -1)  # type: ignore[assignment]
    hidden: Tensor = model(images, **more).last_hidden_state
    return model.post_layernorm(hidden) if family == "clip_vision_model" else hidden


def named(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters, in order, without those that do not affect the tokens."""
    unused = ("mask_token", "pooler")
    return {name: tensor for name, tensor in model.named_parameters() if not any(part in name for part in unused)}


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_tokens_and_gradients_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = reference(family, changes)
    theirs.save_pretrained(tmp_path)
    ours = load_backbone(str(tmp_path))
    assert isinstance(ours.model, Vit)
    assert [*named(theirs)] == [*dict(ours.model.named_parameters())]  # optimiser states are stored in this order
    set_tuning(ours, "full")
    theirs.requires_grad_(True)
    for size in ((16, 16), (8, 32), (24, 20)):  # the trained grid, another one of as many patches, a resized one
        expected, tokens = reference_tokens(theirs, images(*size)), ours.model(images(*size))
        assert torch.equal(tokens, expected)
        for model, result in ((theirs, expected), (ours.model, tokens)):
            model.zero_grad()
            result.square().sum().backward()
        wanted = named(theirs)
        odd = [name for name, tensor in named(ours.model).items() if not torch.equal(tensor.grad, wanted[name].grad)]  # type: ignore[arg-type]
        assert not odd


@pytest.mark.parametrize("family", ["dinov2", "dinov2_with_registers"])
def test_random_weights_are_those_of_transformers(family: str) -> None:
    """Runs with the backbone `tiny` record its digest."""
    torch.manual_seed(3)
    theirs = getattr(transformers, CLASSES[family] + "Model")(
        getattr(transformers, CLASSES[family] + "Config")(**SIZES)
    )
    torch.manual_seed(3)
    ours = Vit(VitConfig.read(family, SIZES, "test"))
    assert all(torch.equal(tensor, theirs.get_parameter(name)) for name, tensor in ours.named_parameters())
    assert load_backbone("tiny").digest().startswith("9904bbeaffa7cd00")


@pytest.mark.parametrize("family", LAYOUTS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    """Files leave out what equals the default."""
    theirs = getattr(transformers, CLASSES[family] + "Config")()
    ours = VitConfig.read(family, {}, "test").to_diff_dict()
    assert ours == {name: getattr(theirs, name) for name in ours}
    assert VitConfig.read(family, ours, "test") == VitConfig.read(family, theirs.to_dict(), "test")


@pytest.mark.parametrize(("family", "changes"), CASES[::2], ids=str)
def test_a_model_object_is_copied(family: str, changes: dict[str, Any]) -> None:
    theirs = reference(family, changes)
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = load_backbone(theirs)
    assert torch.equal(ours.model(images(16, 24)), reference_tokens(theirs, images(16, 24)))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())
    assert all(parameter.requires_grad for name, parameter in named(theirs).items() if "position" not in name)


@pytest.mark.parametrize("kind", ["DeiT", "CLIP", "ViTForImageClassification"])
def test_a_larger_model_object_gives_its_image_tower(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "CLIP":
        tower, text = SIZES | {"intermediate_size": 96}, {"hidden_size": 16, "num_hidden_layers": 1}
        whole: Any = transformers.CLIPModel(transformers.CLIPConfig(vision_config=tower, text_config=text)).eval()
        expected = reference_tokens(whole.vision_model, images(16, 16))
    elif kind == "DeiT":
        whole = transformers.DeiTModel(transformers.DeiTConfig(**SIZES)).eval()
        expected = whole(images(16, 16)).last_hidden_state
    else:
        whole = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES)).eval()
        expected = whole.vit(images(16, 16)).last_hidden_state
    tokens = load_backbone(whole)(images(16, 16))
    assert torch.equal(tokens.patches, expected[:, -16:]) and torch.equal(tokens.cls, expected[:, 0])
    assert all(parameter.requires_grad for parameter in whole.parameters())


def test_an_object_that_is_no_vision_model_is_refused() -> None:
    with pytest.raises(ValueError, match="vision model of transformers or timm, not a Linear; .*PatchGen"):
        load_backbone(nn.Linear(2, 2))

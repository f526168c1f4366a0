"""Folders in timm's layout: tokens against a forward pass written out over timm's names, and full sizes by shape."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from benchmarks.encoders import CARDS, REFUSED, SMALL, TIMM, TimmVit, write_timm
from patchgen.model.attention import attention_layers
from patchgen.model.backbone import load_backbone
from patchgen.model.convert import build
from patchgen.model.names import BACKBONES
from patchgen.model.selector import Selector
from patchgen.model.tuning import TUNING, set_tuning
from patchgen.model.vit_files import read_timm

KINDS = {
    **TIMM,
    "positions without prefix": replace(SMALL, no_embed_class=True),
    "registers with positions": replace(SMALL, registers=3),
    "registers without LayerScale": replace(SMALL, registers=2, layer_scale=False),
}
every_kind = pytest.mark.parametrize("vit", KINDS.values(), ids=KINDS)


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def explicit(state: dict[str, Tensor], vit: TimmVit, pixels: Tensor) -> Tensor:
    """timm's forward_features over its own names and fused layers: (B, prefix + P, D)."""
    batch, rows, columns = len(pixels), pixels.shape[2] // vit.patch, pixels.shape[3] // vit.patch
    side = vit.image // vit.patch
    patches = F.conv2d(pixels, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=vit.patch)
    patches = patches.flatten(2).transpose(1, 2)  # (B, P, D)
    prefix = [state["cls_token"]] + ([state["reg_token"]] if vit.registers else [])
    tokens = torch.cat([part.expand(batch, -1, -1) for part in prefix], 1)
    before = 0 if vit.no_embed_class else 1 + vit.registers
    grid = state["pos_embed"][:, before:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if (rows, columns) != (side, side):
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=True)
    grid = grid.permute(0, 2, 3, 1).reshape(1, rows * columns, -1)
    if vit.no_embed_class:
        x = torch.cat([tokens, patches + grid], 1)
    else:
        x = torch.cat([tokens, patches], 1) + torch.cat([state["pos_embed"][:, :before], grid], 1)
    for block in range(vit.depth):
        own = {name.removeprefix(f"blocks.{block}."): tensor for name, tensor in state.items()
               if name.startswith(f"blocks.{block}.")}  # fmt: skip
        x = x + own.get("ls1.gamma", torch.ones(())) * attention(own, norm(x, own, "norm1"), vit.heads)
        x = x + own.get("ls2.gamma", torch.ones(())) * feed_forward(own, norm(x, own, "norm2"), vit.gated)
    return norm(x, state, "norm")


def norm(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def attention(own: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    batch, count, dim = x.shape
    qkv = x @ own["attn.qkv.weight"].T + own["attn.qkv.bias"]
    q, k, v = qkv.reshape(batch, count, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
    mixed = (q @ k.transpose(-1, -2) / (dim // heads) ** 0.5).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(batch, count, dim) @ own["attn.proj.weight"].T + own["attn.proj.bias"]


def feed_forward(own: dict[str, Tensor], x: Tensor, gated: bool) -> Tensor:
    hidden = x @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"]
    if gated:  # SwiGLUPacked: the first half is the gate
        gate, value = hidden.chunk(2, -1)
        hidden = gate * gate.sigmoid() * value
    else:
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    return hidden @ own["mlp.fc2.weight"].T + own["mlp.fc2.bias"]


@every_kind
def test_tokens_are_those_of_timms_forward_pass(vit: TimmVit, tmp_path: Path) -> None:
    state = write_timm(vit, tmp_path)
    backbone = load_backbone(str(tmp_path))
    prefix = 1 + vit.registers
    assert (backbone.dim, backbone.patch_size, backbone.num_prefix_tokens) == (vit.width, vit.patch, prefix)
    for height, width in ((32, 32), (16, 24), (48, 40)):  # positions as they are, and resized both ways
        expected, tokens = explicit(state, vit, images(height, width)), backbone(images(height, width))
        torch.testing.assert_close(tokens.patches, expected[:, prefix:], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(tokens.cls, expected[:, 0], atol=2e-5, rtol=1e-4)


@every_kind
def test_selection_and_attention_work_on_it(vit: TimmVit, tmp_path: Path) -> None:
    write_timm(vit, tmp_path)
    backbone = load_backbone(str(tmp_path))
    selector, plain = Selector(backbone), backbone(images(32, 32))
    assert selector(backbone, images(32, 32)).mask.shape == (2, 16)
    alike = selector(backbone, images(32, 32), mask=torch.full((2, 16), 0.3)).tokens
    assert torch.equal(alike.cls, plain.cls) and torch.equal(alike.patches, plain.patches)
    only = torch.zeros(2, 16)
    only[:, 3] = 1  # a class token that reads one patch is another one
    assert (selector(backbone, images(32, 32), mask=only).tokens.cls - plain.cls).abs().max() > 1e-3
    assert len(attention_layers(backbone)) == vit.depth


@pytest.mark.parametrize("mode", sorted(TUNING))
def test_every_trainable_tensor_gets_a_gradient(mode: str, tmp_path: Path) -> None:
    write_timm(TIMM["Virchow2"], tmp_path)
    backbone = load_backbone(str(tmp_path))
    names = set_tuning(backbone, mode)
    if names:
        backbone(images(16, 16)).patches.square().sum().backward()
    assert [name for name, parameter in backbone.named_parameters() if parameter.grad is not None] == names


@pytest.mark.parametrize("name", sorted(CARDS))
def test_published_sizes_fill_the_named_architecture(name: str) -> None:
    """Names and shapes of the whole network on the meta device: what timm publishes is what the name builds."""
    vit, spec = CARDS[name], BACKBONES[name]
    state = {key: torch.empty(shape, device="meta") for key, shape in vit.shapes().items()}
    about = vit.about()
    del about["model_args"]["num_heads"]  # cards leave it to the architecture
    read = read_timm(Path(name), about, state)
    settings = {"mlp_ratio": 4, "qkv_bias": True, "use_swiglu_ffn": False} | spec.config
    assert read.config == settings
    with torch.device("meta"):
        model = build(spec.family, spec.config)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert {key: tensor.shape for key, tensor in read.state.items()} == shapes


@pytest.mark.parametrize(("name", "millions"), [("uni", 303.4), ("virchow", 631.2), ("prov-gigapath", 1134.95)])
def test_parameters_are_as_many_as_published(name: str, millions: float) -> None:
    assert sum(torch.Size(shape).numel() for shape in CARDS[name].shapes().values()) / 1e6 == pytest.approx(
        millions, rel=2e-3
    )


def test_pixels_and_licence_come_from_its_config(tmp_path: Path) -> None:
    said = {"mean": [0.7, 0.6, 0.5], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic", "license": "cc-by-nc-nd-4.0"}
    write_timm(SMALL, tmp_path, {"pretrained_cfg": said})
    backbone = load_backbone(str(tmp_path))
    assert (backbone.mean, backbone.std, backbone.interpolation) == ((0.7, 0.6, 0.5), (0.2, 0.3, 0.4), "bicubic")
    assert (backbone.licence, backbone.assumed) == ("cc-by-nc-nd-4.0", "")
    write_timm(SMALL, tmp_path)
    assert "ImageNet's mean and std and bilinear resizing by default" in load_backbone(str(tmp_path)).description
    write_timm(SMALL, tmp_path, {"pretrained_cfg": {"interpolation": "magic"}})
    with pytest.raises(ValueError, match="interpolation must be one of.*'magic'"):
        load_backbone(str(tmp_path))


def test_a_copied_folder_is_recognised_by_name_and_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the files leave out comes from the model card; a folder that only has the name gets nothing."""
    sizes = {"hidden_size": SMALL.width, "num_hidden_layers": SMALL.depth, "patch_size": SMALL.patch}
    write_timm(SMALL, tmp_path / "H0-mini")
    plain = load_backbone(str(tmp_path / "H0-mini"))
    assert plain.licence == "unknown" and plain.assumed
    monkeypatch.setitem(BACKBONES, "h0-mini", replace(BACKBONES["h0-mini"], config=sizes))
    known = load_backbone(str(tmp_path / "H0-mini"))
    assert (known.licence, known.interpolation, known.assumed) == ("CC-BY-NC-ND-4.0", "bicubic", "")
    assert known.mean == (0.707223, 0.578729, 0.703617)
    write_timm(
        SMALL, tmp_path / "H0-mini", {"pretrained_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3, "interpolation": "box"}}
    )
    assert load_backbone(str(tmp_path / "H0-mini")).pixels[:3] == ((0.1,) * 3, (0.2,) * 3, "box")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_networks_of_timm_are_refused_in_words(name: str, tmp_path: Path) -> None:
    architecture, changes = REFUSED[name]
    write_timm(SMALL, tmp_path, {"architecture": architecture}, changes)
    with pytest.raises(ValueError, match=rf"plain vision transformer.*{architecture}.*timm:NAME"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize(
    ("about", "changes", "words"),
    [
        ({"model_args": {"qk_norm": True}}, {}, "qk_norm True"),
        ({"model_args": {"act_layer": "quick_gelu"}}, {}, "act_layer 'quick_gelu'"),
        ({"model_args": {"act_layer": "silu"}}, {}, "act_layer 'silu'"),
        ({"model_args": {}}, {}, "num_heads into model_args"),
        ({}, {"norm_pre.weight": (64,)}, "'norm_pre.weight' is not part of a plain ViT"),
        ({}, {"blocks.0.attn.q_norm.weight": (16,)}, r"q_norm\.weight' is not part"),
        ({}, {"cls_token": None}, "cls_token not found"),
        ({}, {"pos_embed": (1, 19, 64)}, "19 position embeddings"),
        ({}, {"blocks.2.norm2.bias": None}, r"does not fill.*norm2\.bias"),
        ({}, {"blocks.0.mlp.fc2.weight": (64, 100)}, "feed-forward layers of 256 and 100"),
    ],
)
def test_what_does_not_fit_is_named(about: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_timm(SMALL, tmp_path, about, changes)
    with pytest.raises(ValueError, match=rf"(?s){words}"):
        load_backbone(str(tmp_path))


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    state = write_timm(SMALL, tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert load_backbone(str(tmp_path)).dim == 64  # safetensors are there, the pickle is not touched
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"can run code.*safetensors.*save_file"):
        load_backbone(str(tmp_path))


def test_the_architecture_alone_builds_it_again(tmp_path: Path) -> None:
    write_timm(TIMM["Virchow2"], tmp_path / "vit")
    first = load_backbone(str(tmp_path / "vit"))
    shutil.rmtree(tmp_path / "vit")
    facts = {key: value for key, value in first.model.config.to_diff_dict().items() if key != "model_type"}
    again: Any = build(first.model_type, json.loads(json.dumps(facts)))
    again.load_state_dict(first.model.state_dict())
    assert torch.equal(again(images(16, 16)), first.model(images(16, 16)))


def test_names_have_a_licence_and_a_note() -> None:
    names = [*CARDS, "dinov3-small", "dinov3-base", "dinov3-large", "siglip2-b16", "pe-core-b16", "phikon", "phikon-v2"]
    assert all(BACKBONES[name].licence and BACKBONES[name].note for name in names)
    with pytest.raises(ValueError, match=r'pip install "patchgen\[timm\]"'):
        load_backbone("pe-core-b16")


@pytest.mark.parametrize(("name", "millions"), [("dinov3-small", 21.6), ("dinov3-base", 85.7), ("dinov3-large", 303.1)])
def test_dinov3_has_its_published_size(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**BACKBONES[name].config))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=5e-3)

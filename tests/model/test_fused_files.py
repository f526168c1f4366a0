"""Plain ViTs under the fused names of timm and Meta, in folders and single files, against a forward pass over them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn import images
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from benchmarks.encoders import CARDS, SMALL, TIMM, TimmVit, write_timm
from patchgen.model.backbone import load_backbone
from patchgen.model.convert import build, read_file
from patchgen.model.names import BACKBONES
from patchgen.model.preprocessing import IMAGENET
from patchgen.model.vit import VitConfig
from patchgen.model.vit_files import read_fused

KINDS = {
    **TIMM,
    "positions without prefix": replace(SMALL, no_embed_class=True),
    "registers with positions": replace(SMALL, registers=3),
    "registers without LayerScale": replace(SMALL, registers=2, layer_scale=False),
}
every_kind = pytest.mark.parametrize("vit", KINDS.values(), ids=KINDS)


def explicit(state: dict[str, Tensor], pixels: Tensor, heads: int, antialias: bool = True) -> Tensor:
    """The forward pass over the fused names of timm and Meta, (B, prefix + P, D); sizes are those of the tensors."""
    weight, position = state["patch_embed.proj.weight"], state["pos_embed"]
    patches = F.conv2d(pixels, weight, state["patch_embed.proj.bias"], stride=weight.shape[-1])
    batch, _, rows, columns = patches.shape
    side = int(position.shape[1] ** 0.5)
    before = position.shape[1] - side**2  # positions of class and register tokens: of none, of the first, of all
    registers = [state[name] for name in ("reg_token", "register_tokens") if name in state]
    prefix = torch.cat([state["cls_token"], *registers], 1)  # (1, 1 + R, D)
    prefix = prefix + F.pad(position[:, :before], (0, 0, 0, prefix.shape[1] - before))
    grid = position[:, before:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if (rows, columns) != (side, side):
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=antialias)
    x = torch.cat([prefix.expand(batch, -1, -1), (patches + grid).flatten(2).transpose(1, 2)], 1)
    for block in sorted({name.split(".")[1] for name in state if name.startswith("blocks.")}, key=int):
        own = {name.removeprefix(f"blocks.{block}."): tensor for name, tensor in state.items()
               if name.startswith(f"blocks.{block}.")}  # fmt: skip
        x = x + own.get("ls1.gamma", torch.ones(())) * attention(own, norm(x, own, "norm1"), heads)
        x = x + own.get("ls2.gamma", torch.ones(())) * feed_forward(own, norm(x, own, "norm2"))
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


def feed_forward(own: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = x @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"]
    if hidden.shape[-1] != own["mlp.fc2.weight"].shape[1]:  # SwiGLUPacked: the first half is the gate
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
        expected, tokens = explicit(state, images(height, width), vit.heads), backbone(images(height, width))
        torch.testing.assert_close(tokens.patches, expected[:, prefix:], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(tokens.cls, expected[:, 0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(CARDS))
def test_published_sizes_fill_the_named_architecture(name: str) -> None:
    """Names and shapes of the whole network on the meta device: what timm publishes is what the name builds."""
    vit, spec = CARDS[name], BACKBONES[name]
    state = {key: torch.empty(shape, device="meta") for key, shape in vit.shapes().items()}
    about = vit.about()
    del about["model_args"]["num_heads"]  # cards leave it to the architecture
    family, config, tensors = read_fused(state, name, about)
    assert VitConfig.read(family, config, name) == VitConfig.read(spec.family, spec.config, name)
    with torch.device("meta"):
        model = build(spec.family, spec.config)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert {key: tensor.shape for key, tensor in tensors.items()} == shapes


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


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    state = write_timm(SMALL, tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert load_backbone(str(tmp_path)).dim == 64  # safetensors are there, the pickle is not touched
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"can run code.*safetensors.*save_file"):
        load_backbone(str(tmp_path))


# Single files


def file_state(layer_scale: bool, registers: int) -> dict[str, Tensor]:
    """A random two-block ViT as in a single file; registers and the mask token are under Meta's names."""
    shapes = TimmVit(128, 2, 2, 512, 4, 16, layer_scale=layer_scale).shapes()
    shapes |= {"mask_token": (1, 128)} if layer_scale else {}
    shapes |= {"register_tokens": (1, registers, 128)} if registers else {}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


@pytest.mark.parametrize("size", [(16, 16), (8, 20)])
@pytest.mark.parametrize(("layer_scale", "registers", "prefix"), [(False, 0, 1), (True, 0, 1), (True, 4, 5)])
def test_weight_files_give_the_tokens_of_an_explicit_forward(
    tmp_path: Path, layer_scale: bool, registers: int, prefix: int, size: tuple[int, int]
) -> None:
    state = file_state(layer_scale, registers)
    head = {} if layer_scale else {"head.weight": torch.zeros(10, 128), "head.bias": torch.zeros(10)}
    save_file(state | head, tmp_path / "vit.safetensors")
    backbone = load_backbone(str(tmp_path / "vit.safetensors"))
    tokens, expected = backbone(images(*size)), explicit(state, images(*size), 2, antialias="register_tokens" in state)
    assert backbone.num_prefix_tokens == prefix
    assert tokens.grid == (size[0] // 4, size[1] // 4)
    torch.testing.assert_close(tokens.patches, expected[:, prefix:], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(tokens.cls, expected[:, 0], atol=2e-5, rtol=1e-4)
    assert backbone.mean == (IMAGENET[0] if layer_scale else (0.5, 0.5, 0.5))
    assert {module.eps for module in backbone.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}


def test_half_precision_files_are_widened(tmp_path: Path) -> None:
    save_file({name: tensor.half() for name, tensor in file_state(False, 0).items()}, tmp_path / "half.safetensors")
    assert {parameter.dtype for parameter in load_backbone(str(tmp_path / "half.safetensors")).parameters()} == {
        torch.float32
    }


def test_weight_files_that_are_no_plain_vit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        load_backbone(str(path))
    path.write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="not a readable"):
        load_backbone(str(path))
    save_file({"conv.weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="plain ViT"):
        load_backbone(str(path))
    state = file_state(False, 0)
    save_file(state | {"fc_norm.weight": torch.zeros(128)}, path)
    with pytest.raises(ValueError, match="fc_norm"):
        read_file(path)
    del state["blocks.1.norm2.bias"]
    save_file(state, path)
    with pytest.raises(ValueError, match="layers.1.layernorm_after.bias"):
        read_file(path)

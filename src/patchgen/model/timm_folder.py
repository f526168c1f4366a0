"""Plain vision transformers in timm's layout, in which pathology encoders are published -> DINOv2 of transformers.

    vit = read_timm(folder, about, state)              # config.json as a dict, tensors under timm's names
    build("dinov2_with_registers", vit.config).load_state_dict(vit.state)

Depth, width, patches, registers, LayerScale and the kind of feed-forward layer are read from the tensors, the number of
heads from `model_args` or from the width. Rotary positions, the order of norms and the activation cannot be inferred
from the tensors, so only timm's names of plain ViTs are accepted, and arguments that change them are rejected. The
outputs stay the same: timm's position embeddings of class and register tokens are added to these tokens, a network
without LayerScale gets one of ones, and positions are resized as in timm (bicubic, antialiased).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchgen.common.reading import shortly
from patchgen.model.pixels import Pixels, timm_pixels

HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}  # by width, as published
PICKLED = (
    'Convert it to safetensors on a machine where you trust it: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('pytorch_model.bin', weights_only=True, map_location='cpu'), 'model.safetensors')\""
)
ACTIVATIONS = {True: (None, "silu", "swish"), False: (None, "gelu")}  # of a gated and of a plain feed-forward layer
PLAIN = re.compile(
    r"vit_(tiny|small|base|large|huge|giant|gigantic)_patch\d+(_reg\d+)?_(\d+|dinov2)(\..+)?"
)  # timm's names of ViTs without special features
# timm arguments that can change the network without changing its tensors, and the values that leave it unchanged
HARMLESS: dict[str, tuple[Any, ...]] = {
    "norm_layer": (None, "layernorm"), "qk_norm": (None, False), "pre_norm": (None, False), "class_token": (None, True),
    "mlp_layer": (None, "mlp", "swiglupacked"),
}  # fmt: skip
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias)?$")
_TOP = {
    "cls_token": "embeddings.cls_token",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
_INNER = {
    "norm1": "norm1", "norm2": "norm2", "attn.proj": "attention.o_proj", "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}  # fmt: skip
NEEDED = ("cls_token", "pos_embed", "patch_embed.proj.weight", "norm.weight", "blocks.0.mlp.fc1.weight",
          "blocks.0.mlp.fc2.weight")  # fmt: skip


class TimmFolder(NamedTuple):
    """Settings and tensors of a `Dinov2WithRegistersModel`, its pixels and its licence."""

    config: dict[str, Any]
    state: dict[str, Tensor]
    pixels: Pixels
    licence: str


def heads_of(width: int) -> int | None:
    """The number of attention heads of the published plain ViT of a width."""
    return HEADS.get(width)


def read_timm(folder: Path, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> TimmFolder:
    """The model in a folder in timm's layout.

    Args:
        about: Its config.json.
        state: Its tensors.

    Raises:
        ValueError: it is not a plain ViT; the message names the difference.
    """
    given = about.get("model_args")
    arguments = given if isinstance(given, dict) else {}
    said = about.get("pretrained_cfg")
    said = said if isinstance(said, dict) else about  # the oldest layout is flat
    _check(folder, str(about["architecture"]), arguments)
    body = _body(folder, state)
    config = _config(folder, body, arguments)
    licence = said.get("license")
    pixels = timm_pixels(folder / "config.json", said)
    return TimmFolder(config, _renamed(folder, body, config), pixels, licence if isinstance(licence, str) else "")


def _check(folder: Path, architecture: str, arguments: Mapping[str, Any]) -> None:
    """Reject models that are not plain ViTs by their name or arguments."""
    if not PLAIN.fullmatch(architecture):
        raise ValueError(
            f"a folder in timm's layout must hold a plain vision transformer such as vit_large_patch16_224 or "
            f"vit_giant_patch14_reg4_dinov2, and {folder} has {shortly(architecture)}; where timm can be installed, "
            "give it as timm:NAME"
        )
    for name, values in HARMLESS.items():
        _refuse_unless(folder, arguments, name, values)


def _refuse_unless(folder: Path, arguments: Mapping[str, Any], name: str, values: tuple[Any, ...]) -> None:
    value = arguments.get(name)
    if (value.lower() if isinstance(value, str) else value) not in values:
        raise ValueError(
            f"{folder}: model_args has {name} {shortly(value)}, which this plain vision transformer cannot have; where "
            "timm can be installed, give it as timm:NAME"
        )


def _body(folder: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in float32 without a classifier; a norm of the pooled vector alone becomes the norm of all tokens."""
    body = {name: tensor.float() for name, tensor in state.items() if not name.startswith(("head.", "head_drop."))}
    for part in ("weight", "bias"):
        if f"fc_norm.{part}" in body and f"norm.{part}" not in body:
            body[f"norm.{part}"] = body.pop(f"fc_norm.{part}")
    if missing := [name for name in NEEDED if name not in body]:
        raise ValueError(
            f"{folder} does not hold a plain ViT under timm's names: {', '.join(missing)} not found (it has "
            f"{', '.join(sorted(body)[:3])}); where timm can be installed, give it as timm:NAME"
        )
    return body


def _config(folder: Path, state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same network as a DINOv2."""
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    outer, inner = len(state["blocks.0.mlp.fc1.weight"]), state["blocks.0.mlp.fc2.weight"].shape[1]
    gated = outer == 2 * inner  # SwiGLUPacked: gate and value in one layer
    _refuse_unless(folder, arguments, "act_layer", ACTIVATIONS[gated])
    heads = arguments.get("num_heads") or heads_of(width)
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise ValueError(
            f"{folder}: the number of heads of a ViT of width {width} is not known; put num_heads into model_args of "
            "its config.json, as its model card says"
        )
    ratio = next((r for r in range(1, 17) if (_gated_width(width * r) if gated else width * r) == inner), None)
    if ratio is None or (not gated and outer != inner) or channels != 3 or len(set(patch)) > 1:
        raise ValueError(
            f"{folder}: a plain ViT has square patches of three channels and a feed-forward layer of a whole multiple "
            f"of its width, plain or as SwiGLU; this one has patches {tuple(patch)} of {channels}, width {width}, and "
            f"feed-forward layers of {outer} and {inner}"
        )
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    side, _ = _positions(folder, state["pos_embed"].shape[1], registers)
    return {
        "hidden_size": width,
        "num_hidden_layers": 1 + max(int(match[1]) for name in state if (match := _BLOCK.match(name))),
        "num_attention_heads": heads,
        "mlp_ratio": ratio,
        "use_swiglu_ffn": gated,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "num_register_tokens": registers,
        "patch_size": patch[0],
        "image_size": side * patch[0],
    }


def _gated_width(hidden: int) -> int:
    """The width of DINOv2's SwiGLU layer: two thirds, rounded up to a multiple of eight."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def _positions(folder: Path, count: int, registers: int) -> tuple[int, int]:
    """Side of the grid of position embeddings, and the number before it: none, or one per prefix token."""
    for before in (0, 1 + registers):
        side = round((count - before) ** 0.5) if count > before else 0
        if side and side * side == count - before:
            return side, before
    raise ValueError(f"{folder} has {count} position embeddings, which is no square grid of patches")


def _renamed(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under the names of transformers."""
    width, registers = config["hidden_size"], config["num_register_tokens"]
    _, before = _positions(folder, state["pos_embed"].shape[1], registers)
    position = state["pos_embed"]  # (1, before + P, D)
    first = position[:, :1] if before else position.new_zeros(1, 1, width)
    register = state.get("reg_token", position.new_zeros(1, 0, width))  # (1, R, D)
    renamed = {
        "embeddings.position_embeddings": torch.cat([first, position[:, before:]], 1),
        "embeddings.register_tokens": register + position[:, 1:before] if before > 1 else register,
    }
    for layer in range(config["num_hidden_layers"]):
        for scale in (1, 2):
            renamed[f"encoder.layer.{layer}.layer_scale{scale}.lambda1"] = position.new_ones(width)
    for name, tensor in state.items():
        if name not in ("pos_embed", "reg_token"):
            renamed |= _parts(folder, name, tensor, config["use_swiglu_ffn"])
    return renamed


def _parts(folder: Path, name: str, tensor: Tensor, gated: bool) -> dict[str, Tensor]:
    """One tensor under its new name; a fused layer is split into its parts."""
    if name in _TOP:
        return {_TOP[name]: tensor}
    match = _BLOCK.match(name)
    inner, kind = (match[2], match[3] or "") if match else ("", "")
    place = f"encoder.layer.{match[1]}." if match else ""
    split = {"attn.qkv": [f"attention.{letter}_proj" for letter in "qkv"]}
    split |= {"mlp.fc1": ["mlp.gate_proj", "mlp.up_proj"]} if gated else {}
    if inner in split:  # rows are q, k, v; or the gate (through SiLU), then what it multiplies
        chunks = tensor.chunk(len(split[inner]))
        return {f"{place}{new}{kind}": part.contiguous() for new, part in zip(split[inner], chunks, strict=True)}
    plain = {**_INNER, "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.down_proj" if gated else "mlp.fc2"}
    if inner not in plain:
        raise ValueError(
            f"{folder}: tensor {name!r} is not part of a plain ViT; where timm can be installed, give it as timm:NAME"
        )
    return {f"{place}{plain[inner]}{kind}": tensor}

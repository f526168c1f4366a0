"""Tensors in files -> plain ViTs: transformers folders, timm folders, and files under timm's or Meta's names.

The tensors decide the sizes: a config that disagrees is refused before anything is allocated. Rotary positions, the
order of norms and the activation do not show in tensors, so of timm's layout only names of plain ViTs are accepted.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.common.untrusted import shortly
from patchgen.model.vit import LAYOUTS, Vit, VitConfig, gated_width

State = Mapping[str, Tensor]
DEPTH = re.compile(r"depth|num\w*(layer|block|stage)")  # fields that say how many modules a network has
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}  # by width, as published


def build_vit(family: str, given: Mapping[str, Any], state: State, where: object) -> Vit:
    """A ViT with copies of these tensors in float32; tensors that it does not have are ignored."""
    config, message = VitConfig.read(family, given, where), f"{where} does not fill a {family}"
    pattern = re.compile(rf"{re.escape(LAYOUTS[family].blocks)}\.(\d+)\.")
    depth = len({match[1] for name in state if (match := pattern.match(name))})
    if depth != config.num_hidden_layers:
        raise ValueError(f"{message}: num_hidden_layers is {config.num_hidden_layers}, its weights have {depth} blocks")
    with torch.device("meta"):
        vit = Vit(config)
    check_tensors(vit, state, message)
    copies = {name: state[name].to(torch.float32, copy=True) for name in vit.state_dict()}
    vit.load_state_dict(copies, assign=True)
    return vit


def check_tensors(network: nn.Module, state: State, message: str) -> None:
    """ValueError unless the state has every tensor of a network, with its shape and finite values."""
    expected = network.state_dict()
    if missing := [name for name in expected if name not in state]:
        raise ValueError(f"{message}: {', '.join(missing[:5])} missing")
    for name, wanted in expected.items():
        tensor = state[name]
        if tensor.shape != wanted.shape:
            fault = f"is {tuple(tensor.shape)} in the weights, {tuple(wanted.shape)} by the config"
        elif tensor.is_floating_point() != wanted.is_floating_point():
            fault = f"is {tensor.dtype}, not {wanted.dtype}"
        elif not (tensor.is_meta or torch.isfinite(tensor).all()):
            fault = "holds values that are not finite"
        else:
            continue
        raise ValueError(f"{message}: {name} {fault}")


def check_sizes(make: Callable[[], nn.Module], fields: Mapping[str, Any], state: State) -> None:
    """ValueError if a network with this config would be much larger than its weights; nothing is allocated."""
    _check_depth(fields, len(state))
    with torch.device("meta"):
        model = make()
    expected, present = (sum(tensor.numel() for tensor in tensors) for tensors in (model.parameters(), state.values()))
    if expected > 2 * present + 1_000_000:
        raise ValueError(f"its config describes {expected:,} numbers, and the weights have {present:,}")


def _check_depth(fields: Mapping[str, Any], most: int) -> None:
    for name, value in fields.items():
        counts = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, dict):
            _check_depth(value, most)
        elif DEPTH.search(str(name)) and sum(count for count in counts if isinstance(count, int)) > most:
            raise ValueError(f"{name} is {value}, and the weights have only {most} tensors")


# transformers

# tensor names of files on hubs -> those of `Vit`
_RENAMED = (
    (re.compile(r"attention\.attention\.(q|k|v)\w+"), r"attention.\1_proj"),
    (re.compile(r"attention\.output\.dense"), "attention.o_proj"),
    (re.compile(r"intermediate\.dense"), "mlp.fc1"),
    (re.compile(r"(?<=\d\.)output\.dense"), "mlp.fc2"),
    (re.compile(r"mlp\.weights_out"), "mlp.down_proj"),
)
_GATED = "mlp.weights_in."


def read_vit(family: str, given: Mapping[str, Any], state: State, where: object) -> Vit:
    """The ViT of a transformers folder with these fields of config.json, or the image tower of a larger model in it."""
    inside = "embeddings.patch_embedding"
    prefix = next((name.partition(inside)[0] for name in state if inside in name), "")
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith(prefix):
            continue
        name = name.removeprefix(prefix)
        for pattern, new in _RENAMED:
            name = pattern.sub(new, name)
        if LAYOUTS[family].blocks == "layers":
            name = name.replace("encoder.layer.", "layers.", 1)
        if _GATED in name and tensor.ndim:
            for part, half in zip(("mlp.gate_proj.", "mlp.up_proj."), tensor.chunk(2), strict=False):
                renamed[name.replace(_GATED, part)] = half
        else:
            renamed[name] = tensor
    return build_vit(family, given, renamed, where)


# One qkv matrix per block: timm, Meta

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias)?$")
_DIMENSIONS = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "norm.weight": 1,
               "blocks.0.mlp.fc1.weight": 2, "blocks.0.mlp.fc2.weight": 2}  # fmt: skip
_REGISTERS = ("register_tokens", "reg_token")  # Meta's name, timm's
_UNUSED = ("head.", "mask_token")
PLAIN = re.compile(
    r"vit_(tiny|small|base|large|huge|giant|gigantic)_patch\d+(_reg\d+)?_(\d+|dinov2)(\..+)?"
)  # timm's names of ViTs without special features
# timm arguments that can change the network without changing its tensors, and the values that leave it unchanged
HARMLESS: dict[str, tuple[Any, ...]] = {
    "norm_layer": (None, "layernorm"), "qk_norm": (None, False), "pre_norm": (None, False), "class_token": (None, True),
    "mlp_layer": (None, "mlp", "swiglupacked"),
}  # fmt: skip
ACTIVATIONS = {True: (None, "silu", "swish"), False: (None, "gelu")}  # of a gated and of a plain feed-forward layer
ELSEWHERE = "give a transformers folder, or timm:NAME where timm can be installed"


def read_fused(
    state: State, where: object, about: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Family, config and tensors of a plain ViT in a single file, or of a folder in timm's layout.

    A file without LayerScale is a `vit`. A folder, whose config.json is ``about``, always is a `dinov2_with_registers`,
    with the same output: without LayerScale it gets one of ones.
    """
    arguments = {} if about is None else _model_args(about, where)
    body = {name: tensor for name, tensor in state.items() if not name.startswith(_UNUSED)}
    for part in ("weight", "bias"):  # a norm of the pooled vector alone becomes the norm of all tokens
        if f"fc_norm.{part}" in body and f"norm.{part}" not in body:
            body[f"norm.{part}"] = body.pop(f"fc_norm.{part}")
    sizes = _sizes(body, where)
    width, registers, positions = sizes["hidden_size"], sizes["num_register_tokens"], body["pos_embed"].shape[1]
    outer, inner = len(body["blocks.0.mlp.fc1.weight"]), body["blocks.0.mlp.fc2.weight"].shape[1]
    gated = outer == 2 * inner  # SwiGLUPacked: gate and value in one layer
    for name, values in {**HARMLESS, "act_layer": ACTIVATIONS[gated]}.items():
        value = arguments.get(name)
        if (value.lower() if isinstance(value, str) else value) not in values:
            raise ValueError(f"{where}: no plain vision transformer has {name} {shortly(value)}; {ELSEWHERE}")
    usual = HEADS.get(width) or (width // 64 if about is None and width % 64 == 0 else None)
    heads = arguments.get("num_heads") or usual
    if type(heads) is not int or heads < 1 or width % heads:
        raise ValueError(
            f"{where}: the number of heads of a ViT of width {width} is not known; put num_heads into model_args of "
            "the config.json of a folder in timm's layout, as its model card says"
        )
    ratio = next((r for r in range(1, 17) if (gated_width(width * r) if gated else width * r) == inner), None)
    # positions are those of the grid alone, or also of the class token, or also of the registers
    sides = {before: round(max(positions - before, 0) ** 0.5) for before in (0, 1, 1 + registers)}
    before = next((before for before, side in sides.items() if side and side**2 == positions - before), None)
    if ratio is None or before is None or (not gated and outer != inner):
        raise ValueError(
            f"{where}: a plain ViT has a feed-forward layer of a whole multiple of its width, plain or as SwiGLU, and "
            f"positions for a square grid of patches; this one has width {width}, feed-forward layers of {outer} and "
            f"{inner}, and {positions} position embeddings"
        )
    config = sizes | {
        "num_attention_heads": heads, "mlp_ratio": ratio, "intermediate_size": inner, "use_swiglu_ffn": gated,
        "qkv_bias": "blocks.0.attn.qkv.bias" in body, "image_size": sides[before] * sizes["patch_size"],
        "layer_norm_eps": 1e-6,
    }  # fmt: skip
    family = "dinov2_with_registers"
    if about is None and not registers:
        family = "dinov2" if "blocks.0.ls1.gamma" in body else "vit"
    return family, config, _split(_with_positions(body, before), family, gated, where)


def _model_args(about: Mapping[str, Any], folder: object) -> Mapping[str, Any]:
    """timm's arguments of the network in a folder, whose name must be that of a plain ViT."""
    architecture, arguments = about["architecture"], about.get("model_args")
    if not isinstance(architecture, str) or not PLAIN.fullmatch(architecture):
        raise ValueError(
            f"a folder in timm's layout must hold a plain vision transformer such as vit_large_patch16_224 or "
            f"vit_giant_patch14_reg4_dinov2, and {folder} has {shortly(architecture)}; {ELSEWHERE}"
        )
    return arguments if isinstance(arguments, dict) else {}


def _sizes(state: State, where: object) -> dict[str, int]:
    """Width, depth, patch size and number of registers, read from the tensors."""
    rule = f"{where} must hold a plain ViT under timm's or Meta's names (a file also a RegNetY); {ELSEWHERE}"
    missing = [name for name, count in _DIMENSIONS.items() if name not in state or state[name].ndim != count]
    if missing:
        raise ValueError(f"{rule}; {', '.join(missing)} not found (it has {', '.join(sorted(state)[:3])})")
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    registers = next((state[name] for name in _REGISTERS if name in state), torch.empty(1, 0, width))
    widths = [size for tensor in (state["cls_token"], state["pos_embed"], registers) for size in tensor.shape[-1:]]
    if channels != 3 or patch[0] != patch[1] or registers.ndim != 3 or set(widths) != {width}:
        raise ValueError(f"{rule}; its patches are {tuple(patch)} pixels of {channels} channels, its widths {widths}")
    depth = len({match[1] for name in state if (match := _BLOCK.match(name))})
    return {"hidden_size": width, "num_hidden_layers": depth, "num_register_tokens": registers.shape[1],
            "patch_size": patch[0]}  # fmt: skip


def _with_positions(state: State, before: int) -> dict[str, Tensor]:
    """DINOv2's positions: one for the class token; those of the registers are added to these tokens."""
    rest = {name: tensor for name, tensor in state.items() if name not in ("pos_embed", *_REGISTERS)}
    position = state["pos_embed"]  # (1, before + P, D)
    first = position[:, :1] if before else position.new_zeros(1, 1, position.shape[2])
    rest["pos_embed"] = torch.cat([first, position[:, before:]], 1)
    registers = next((state[name] for name in _REGISTERS if name in state), position.new_zeros(1, 0, position.shape[2]))
    if before > 1:
        registers = registers.float() + position[:, 1:before].float()
    return rest | {"register_tokens": registers}  # (1, R, D)


def _split(state: State, family: str, gated: bool, where: object) -> dict[str, Tensor]:
    """The tensors under the names of a family; a fused layer is split, a missing LayerScale is one of ones."""
    layout = LAYOUTS[family]
    names, attention = layout.block, layout.block["attention"]
    top = {
        "cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings",
        "register_tokens": "embeddings.register_tokens", "norm.weight": f"{layout.norm}.weight",
        "norm.bias": f"{layout.norm}.bias",
        **{f"patch_embed.proj.{part}": f"embeddings.patch_embeddings.projection.{part}" for part in ("weight", "bias")},
    }  # fmt: skip
    parts = {
        "norm1": [names["norm1"]], "norm2": [names["norm2"]], "attn.proj": [f"{attention}.o_proj"],
        "attn.qkv": [f"{attention}.{letter}_proj" for letter in "qkv"],
        "mlp.fc1": ["mlp.gate_proj", "mlp.up_proj"] if gated else ["mlp.fc1"],  # the gate goes through SiLU
        "mlp.fc2": ["mlp.down_proj" if gated else "mlp.fc2"],
        **({f"ls{i}.gamma": [f"{names[f'scale{i}']}.lambda1"] for i in (1, 2)} if "scale1" in names else {}),
    }  # fmt: skip
    ones = torch.ones_like(state["norm.weight"])
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _BLOCK.match(name)
        targets = parts.get(match[2], []) if match else []
        if name in top:
            renamed[top[name]] = tensor
        elif match and targets and tensor.ndim and len(tensor) % len(targets) == 0:
            block = f"{layout.blocks}.{match[1]}"
            for target, part in zip(targets, tensor.chunk(len(targets)), strict=True):
                renamed[f"{block}.{target}{match[3] or ''}"] = part
            for scale in (parts["ls1.gamma"] + parts["ls2.gamma"]) if "scale1" in names else ():
                renamed.setdefault(f"{block}.{scale}", ones)
        else:
            raise ValueError(
                f"{where}: tensor {name!r} is not part of a plain ViT, or misshapen; "
                f"known per block: {', '.join(parts)}. Or {ELSEWHERE}"
            )
    return renamed

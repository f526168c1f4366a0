"""Files -> transformers models: folders with a config.json, and single weight files with third-party tensor names.

Three layouts of single files are supported: plain ViTs with a fused qkv matrix under the names of timm (such as
`vit_tiny_patch16_224`) or of Meta's DINOv2 (LayerScale as `ls1.gamma`, optionally `register_tokens`), and RegNetY under
the names of torchvision or SWAG. The architecture is inferred from the tensors. No tensor is ever left at random
values: a file that does not provide all weights is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.common.reading import read_json, shortly
from patchgen.common.tensors import read_tensors
from patchgen.model import timm
from patchgen.model.architecture import allowed, fill, folder_tensors, vision_part
from patchgen.model.generic import Family, adopt, build_generic, open_folder, quiet_loading
from patchgen.model.pixels import HALF, IMAGENET, Normalisation, Pixels, earlier_pixels, folder_pixels
from patchgen.model.timm_folder import PICKLED, heads_of, read_timm
from patchgen.model.weights import has_weights

State = Mapping[str, Tensor]

_MASK = "embeddings.mask_token"
FAMILIES = {
    "dinov2": Family("Dinov2Model", "encoder.layer", "layernorm", (_MASK,)),
    "dinov2_with_registers": Family("Dinov2WithRegistersModel", "encoder.layer", "layernorm", (_MASK,)),
    "vit": Family("ViTModel", "layers", "layernorm", ("pooler", _MASK)),
    "vit_mae": Family("ViTMAEModel", "layers", "layernorm"),
    "clip_vision_model": Family("CLIPVisionModel", "encoder.layers", "post_layernorm", norm_tokens=True),
    "resnet": Family("ResNetModel", "encoder.stages", convolutional=True),
    "regnet": Family("RegNetModel", "encoder.stages", convolutional=True),
    "convnext": Family("ConvNextModel", "encoder.stages", "layernorm", convolutional=True, norm_tokens=True),
    "convnextv2": Family("ConvNextV2Model", "encoder.stages", "layernorm", convolutional=True, norm_tokens=True),
    "dinov3_convnext": Family("DINOv3ConvNextModel", "model.stages", "layer_norm", convolutional=True),
}


class Loaded(NamedTuple):
    """A transformers model without its unused parts, and the pixels it expects (None: those usual for its type)."""

    model: nn.Module
    normalisation: Normalisation | Pixels | None = None
    earlier: Pixels | None = None  # for runs from before pixels were recorded, if another rule applied then
    licence: str = ""


def build(family: str, config: dict[str, Any]) -> nn.Module:
    """A randomly initialised model of a family, of another model type of transformers, or of timm."""
    import transformers

    if family == timm.MODEL_TYPE:
        return timm.build_timm(config["name"], pretrained=False)
    if family not in FAMILIES:
        return build_generic(family, config)
    about = FAMILIES[family]
    kind = getattr(transformers, about.config)
    settings = kind(**allowed(kind, config), **_attention(about))
    return _strip(getattr(transformers, about.model)(settings), about)


def read_folder(folder: Path) -> Loaded:
    """A folder of transformers or timm: config.json, weights and pixel settings."""
    import transformers

    if not (folder / "config.json").is_file() or not has_weights(folder):
        raise ValueError(f"a backbone folder must hold config.json and model.safetensors, {folder} does not")
    about = read_json(folder / "config.json")
    model_type = about.get("model_type")
    if model_type is None and "architecture" in about:
        return _read_timm(folder, about)
    family = FAMILIES.get("clip_vision_model" if model_type == "clip" else str(model_type))
    if family is None:
        return _read_generic(folder, about)
    try:
        with quiet_loading(), torch.random.fork_rng(devices=[]):
            kind, (_, fields) = getattr(transformers, family.config), vision_part(about)
            config = kind(**allowed(kind, fields))
            model, info = fill(
                getattr(transformers, family.model), config, folder_tensors(folder), **_attention(family)
            )
    except Exception as error:  # transformers raises many types on damaged files
        raise ValueError(f"{folder} cannot be read as a {family.model}: {first_line(error)}") from error
    # transformers initialises missing tensors at random: only parts that are dropped may be missing
    missing = sorted(name for name in info["missing_keys"] if not any(name.startswith(part) for part in family.unused))
    if missing or info["mismatched_keys"]:
        wrong = [*missing, *map(str, info["mismatched_keys"])]
        raise ValueError(f"{folder} does not fill a {family.model}; missing or misshapen: {', '.join(wrong[:5])}")
    return _with_pixels(_strip(model, family), folder)


def _read_generic(folder: Path, about: dict[str, Any]) -> Loaded:
    """A vision transformer of a type that is not in `FAMILIES`."""
    try:
        model, info = open_folder(folder, about)
    except Exception as error:  # as above
        raise ValueError(
            f"model type must be one of {sorted(FAMILIES)}, or a vision transformer that transformers knows; {folder} "
            f"has {shortly(about.get('model_type'))} ({first_line(error)})"
        ) from error
    whole = set(model.state_dict())
    adopt(model)
    dropped = whole - set(model.state_dict())
    wrong = [*sorted(set(info["missing_keys"]) - dropped), *map(str, info["mismatched_keys"])]
    if wrong:
        name = type(model).__name__
        raise ValueError(f"{folder} does not fill a {name}; missing or misshapen: {', '.join(wrong[:5])}")
    return _with_pixels(model, folder)


def _with_pixels(model: nn.Module, folder: Path) -> Loaded:
    config: Any = model.config
    return Loaded(model, folder_pixels(folder, config.model_type), earlier_pixels(folder, config.model_type))


def _read_timm(folder: Path, about: dict[str, Any]) -> Loaded:
    """A plain ViT in timm's layout, as a DINOv2 of transformers."""
    if not any(folder.glob("model*.safetensors")):
        raise ValueError(f"{folder} holds a timm model as a pickle, which can run code when it is loaded. {PICKLED}")
    vit = read_timm(folder, about, folder_tensors(folder))
    return Loaded(_filled("dinov2_with_registers", vit.config, vit.state, folder), vit.pixels, licence=vit.licence)


def read_file(path: Path) -> Loaded:
    """A ViT or RegNetY with third-party tensor names in a .safetensors file; half precision becomes float32."""
    try:
        state = {name: tensor.float() for name, tensor in read_tensors(path)[0].items()}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no weight file {path}") from error
    if any(name.startswith("trunk_output.") for name in state):
        family, normalisation = "regnet", IMAGENET
        config, renamed = regnety_architecture(state), convert_regnety(state)
    elif (config := vit_architecture(state)) and "blocks.0.ls1.gamma" in state:
        registers = state.get("register_tokens")
        family = "dinov2" if registers is None else "dinov2_with_registers"
        config["mlp_ratio"] = config.pop("intermediate_size") // config["hidden_size"]
        config |= {} if registers is None else {"num_register_tokens": registers.shape[1]}
        renamed, normalisation = convert_meta_dinov2(state), IMAGENET
    else:
        family, config["layer_norm_eps"] = "vit", 1e-6
        renamed, normalisation = convert_timm_vit(state), HALF
    renamed.pop(_MASK, None)
    assumed = "mean and std are its family's, resizing is bilinear by default"
    return Loaded(_filled(family, config, renamed, path), Pixels(*normalisation, assumed=assumed))


def _filled(family: str, config: dict[str, Any], state: State, path: Path) -> nn.Module:
    """A model of a family with exactly these tensors."""
    with torch.random.fork_rng(devices=[]):
        model = build(family, config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path.name} does not fill a {family} model: {error}") from error
    return model


def _attention(family: Family) -> dict[str, str]:
    return {} if family.convolutional else {"attn_implementation": "sdpa"}


def _strip(model: nn.Module, family: Family) -> nn.Module:
    for name in family.unused:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, None)
    return model


def first_line(error: Exception) -> str:
    """The first line of another library's error, shortened to fit into a message."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


_EMBEDDINGS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "mask_token": "embeddings.mask_token",
    "register_tokens": "embeddings.register_tokens",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
_BLOCK = {"attn.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
_SCALES = {"ls1.gamma": "layer_scale1.lambda1", "ls2.gamma": "layer_scale2.lambda1"}
_META_BLOCK = {"norm1": "norm1", "norm2": "norm2", **_BLOCK, **_SCALES}
_TIMM_BLOCK = {"norm1": "layernorm_before", "norm2": "layernorm_after", **_BLOCK}
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias)?$")


def convert_meta_dinov2(state: State) -> dict[str, Tensor]:
    """Meta's DINOv2 names -> `Dinov2WithRegistersModel` (or `Dinov2Model` when there are no registers)."""
    return _rename(state, blocks="encoder.layer", names=_META_BLOCK)


def convert_timm_vit(state: State) -> dict[str, Tensor]:
    """timm's ViT names -> `ViTModel`; the classifier `head.*` is dropped."""
    body = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    return _rename(body, blocks="layers", names=_TIMM_BLOCK)


def vit_architecture(state: State) -> dict[str, Any]:
    """Depth, width, heads, patch and image size of a plain ViT, read from its tensors."""
    required = ("norm.weight", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
    missing = [name for name in required if name not in state]
    if missing:
        raise ValueError(
            f"a weight file must hold a plain ViT under timm's or Meta's names, or a RegNetY under torchvision's; "
            f"not found: {', '.join(missing)} "
            f"(the file starts with {', '.join(sorted(state)[:3])}). Give a transformers folder for other layouts."
        )
    dim = state["norm.weight"].shape[0]
    side = round((state["pos_embed"].shape[1] - 1) ** 0.5)
    if dim % 64 or side * side + 1 != state["pos_embed"].shape[1]:
        raise ValueError(
            f"a ViT file needs a width divisible by 64 and 1 + n*n position embeddings; this one has width {dim} "
            f"and {state['pos_embed'].shape[1]} positions. Give a transformers folder (with config.json) instead."
        )
    patch = state["patch_embed.proj.weight"].shape[-1]
    blocks = {int(match[1]) for name in state if (match := _BLOCK_NAME.match(name))}
    return {
        "hidden_size": dim,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": heads_of(dim) or dim // 64,
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "patch_size": patch,
        "image_size": side * patch,
    }


def _rename(state: State, blocks: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _BLOCK_NAME.match(name)
        if name in _EMBEDDINGS:
            renamed[_EMBEDDINGS[name]] = tensor
        elif match and match[2] == "attn.qkv":  # (3D, D) or (3D,): rows are q, then k, then v
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{blocks}.{match[1]}.attention.{letter}_proj{match[3]}"] = part.contiguous()
        elif match and match[2] in names:
            renamed[f"{blocks}.{match[1]}.{names[match[2]]}{match[3] or ''}"] = tensor
        else:
            raise ValueError(
                f"tensor {name!r} is not part of a plain ViT under this naming; known per block: attn.qkv, "
                f"{', '.join(names)}. Give a transformers folder (config.json + safetensors) for other models."
            )
    return renamed


_REGNET_BLOCK = re.compile(r"trunk_output\.block(\d+)\.block\d+-(\d+)\.(.+)\.(\w+)$")
_REGNET_STEM = re.compile(r"stem\.(?:stem\.)?([01])\.(\w+)$")
_CONV, _NORM = "convolution", "normalization"
_REGNET_LAYER = {  # torchvision's name, SWAG's where it differs -> transformers'
    "proj.0": f"shortcut.{_CONV}", "proj": f"shortcut.{_CONV}", "proj.1": f"shortcut.{_NORM}",
    "bn": f"shortcut.{_NORM}", "f.a.0": f"layer.0.{_CONV}", "f.a.1": f"layer.0.{_NORM}", "f.b.0": f"layer.1.{_CONV}",
    "f.b.1": f"layer.1.{_NORM}", "f.se.fc1": "layer.2.attention.0", "f.se.excitation.0": "layer.2.attention.0",
    "f.se.fc2": "layer.2.attention.2", "f.se.excitation.2": "layer.2.attention.2", "f.c.0": f"layer.3.{_CONV}",
    "f.c": f"layer.3.{_CONV}", "f.c.1": f"layer.3.{_NORM}", "f.final_bn": f"layer.3.{_NORM}",
}  # fmt: skip


def convert_regnety(state: State) -> dict[str, Tensor]:
    """torchvision's or SWAG's RegNetY names -> `RegNetModel`; the classifier (`fc.*`, `head.*`) is dropped."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block, stem = _REGNET_BLOCK.match(name), _REGNET_STEM.match(name)
        if stem:
            renamed[f"embedder.embedder.{(_CONV, _NORM)[int(stem[1])]}.{stem[2]}"] = tensor
        elif block and block[3] in _REGNET_LAYER:
            layer = f"encoder.stages.{int(block[1]) - 1}.layers.{block[2]}"
            renamed[f"{layer}.{_REGNET_LAYER[block[3]]}.{block[4]}"] = tensor
        elif not name.startswith(("fc.", "head.")):
            raise ValueError(
                f"tensor {name!r} is not part of a RegNetY under torchvision's or SWAG's names; known in a block: "
                f"{', '.join(_REGNET_LAYER)}. Give a transformers folder (config.json + safetensors) for other models."
            )
    # the number of batches, which only training statistics use and some files leave out
    counted = {name.replace("running_mean", "num_batches_tracked") for name in renamed if name.endswith("running_mean")}
    return {name: torch.tensor(0) for name in counted} | {k: v for k, v in renamed.items() if k not in counted}


def regnety_architecture(state: State) -> dict[str, Any]:
    """Widths, depths and group width of a RegNetY, read from its tensors."""
    first = {int(match[1]): tensor for name, tensor in state.items()
             if (match := _REGNET_BLOCK.match(name)) and (match[2], match[3]) == ("0", "f.b.0")}  # fmt: skip
    places = {(int(match[1]), int(match[2])) for name in state if (match := _REGNET_BLOCK.match(name))}
    stem = next((tensor for name, tensor in state.items() if _REGNET_STEM.match(name) and tensor.ndim == 4), None)
    if not first or stem is None or not any(".f.se." in name for name in state):
        raise ValueError(
            "a RegNet file must hold a RegNetY (with squeeze and excitation) under torchvision's or SWAG's names: "
            "stem.0.weight and trunk_output.block1.block1-0.f.b.0.weight and their like"
        )
    stages = sorted(first)
    return {
        "embedding_size": stem.shape[0],
        "hidden_sizes": [first[stage].shape[0] for stage in stages],
        "depths": [sum(stage == at for at, _ in places) for stage in stages],
        "groups_width": first[stages[0]].shape[1],  # (out, in / groups, 3, 3)
        "layer_type": "y",
    }

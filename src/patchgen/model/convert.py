"""Files and objects -> networks, with their pixels and licence; a file that does not provide all weights is rejected.

Plain ViTs become a `Vit`; all other models are those of transformers or timm. Single files hold plain ViTs with a fused
qkv matrix under the names of timm or of Meta's DINOv2, or RegNetY under the names of torchvision or SWAG.
"""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.common.untrusted import read_json, read_tensors
from patchgen.model.generic import TIMM, TimmVit, build_generic, build_timm, open_folder
from patchgen.model.preprocessing import HALF, IMAGENET, Pixels, earlier_pixels, folder_pixels, timm_pixels
from patchgen.model.vit import LAYOUTS, Vit, VitConfig
from patchgen.model.vit_files import build_vit, check_sizes, check_tensors, read_fused, read_vit
from patchgen.model.weights import folder_tensors, has_weights

PICKLED = (
    'Convert it to safetensors on a machine where you trust it: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('pytorch_model.bin', weights_only=True, map_location='cpu'), 'model.safetensors')\""
)


class Loaded(NamedTuple):
    """A network, and what is known of it."""

    model: Any
    pixels: Pixels | None = None  # that it expects; None for those usual for its type
    licence: str = "unknown"
    note: str = ""
    earlier: Pixels | None = None  # for runs from before pixels were recorded, if another rule applied then


def build(family: str, given: Mapping[str, Any], state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A random network of transformers or timm; not much larger than ``state``, the tensors that it will get."""
    if family == TIMM:
        return build_timm(given["name"], pretrained=False)
    if family not in LAYOUTS:
        return build_generic(family, given, state)
    config = VitConfig.read(family, given, f"the architecture of a {family}")
    if state is None:
        return Vit(config)
    check_sizes(lambda: Vit(config), config.to_diff_dict(), state)
    with torch.device("meta"):
        vit = Vit(config)
    empty = {name: torch.empty(tensor.shape) for name, tensor in vit.state_dict().items()}
    vit.load_state_dict(empty, assign=True)  # torch's `to_empty` would import sympy
    return vit


def read_object(model: nn.Module) -> Loaded:
    """A copy of a model object of transformers (of a larger model, its image tower) or timm."""
    if hasattr(model, "forward_features"):
        about: Any = getattr(model, "pretrained_cfg", None) or {}
        wrapped = TimmVit(copy.deepcopy(model), str(about.get("architecture") or type(model).__name__))
        return Loaded(wrapped, wrapped.pixels, wrapped.licence)
    if isinstance(model, Vit):
        return Loaded(copy.deepcopy(model))
    whole: Any = getattr(model, "base_model", model)
    tower: Any = getattr(whole, "vision_model", whole)
    if not hasattr(tower, "config"):
        raise ValueError(
            f"a backbone object must be a vision model of transformers or timm, not a {type(model).__name__}; for "
            "others, PatchGen works on patch tokens directly: patchgen.PatchGen(dim, num_patches)(tokens)"
        )
    family = tower.config.model_type
    if family not in LAYOUTS:
        return Loaded(copy.deepcopy(tower))
    return Loaded(read_vit(family, tower.config.to_dict(), tower.state_dict(), f"the {type(tower).__name__}"))


def read_folder(folder: Path) -> Loaded:
    """A folder of transformers or timm: config.json, weights and pixel settings."""
    if not (folder / "config.json").is_file() or not has_weights(folder):
        raise ValueError(f"a backbone folder must hold config.json and model.safetensors, {folder} does not")
    about = read_json(folder / "config.json")
    model_type, tower = str(about.get("model_type")), about.get("vision_config")
    if "model_type" not in about and "architecture" in about:
        if not any(folder.glob("model*.safetensors")):
            raise ValueError(f"{folder} holds a timm model as a pickle, which can run code on loading. {PICKLED}")
        fields = about.get("pretrained_cfg")
        fields = fields if isinstance(fields, dict) else about  # the oldest layout is flat
        licence, pixels = fields.get("license"), timm_pixels(folder / "config.json", fields)
        vit = build_vit(*read_fused(folder_tensors(folder), folder, about), folder)
        return Loaded(vit, pixels, licence if isinstance(licence, str) else "unknown")
    if model_type == "clip":
        model_type, about = "clip_vision_model", tower if isinstance(tower, dict) else {}
    if model_type in LAYOUTS:
        model: nn.Module = read_vit(model_type, about, folder_tensors(folder), folder)
    else:
        model = open_folder(folder, about)
        model_type = str(model.config.model_type)  # type: ignore[union-attr]
    return Loaded(model, folder_pixels(folder, model_type), earlier=earlier_pixels(folder, model_type))


def read_file(path: Path) -> Loaded:
    """A ViT or RegNetY with third-party tensor names in a .safetensors file; half precision becomes float32."""
    if not path.exists():
        raise FileNotFoundError(f"there is no weight file {path}")
    state = read_tensors(path)[0]
    if any(name.startswith("trunk_output.") for name in state):
        architecture, state = read_regnety({name: tensor.float() for name, tensor in state.items()})
        model = build("regnet", architecture, state)
        check_tensors(model, state, f"{path.name} does not fill a RegNetY")
        model.load_state_dict(state)
    else:
        model = build_vit(*read_fused(state, path.name), path.name)
    pixels = HALF if model.config.model_type == "vit" else IMAGENET  # type: ignore[union-attr]
    return Loaded(model, pixels._replace(assumed="mean and std are its family's, resizing is bilinear by default"))


# RegNetY -> `RegNetModel` of transformers

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


def read_regnety(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The architecture of a RegNetY under torchvision's or SWAG's names, and its tensors for transformers' model."""
    renamed: dict[str, Tensor] = {}
    depths, grouped, stem = Counter[int](), dict[int, Tensor](), None  # stage -> blocks, a convolution in groups
    for name, tensor in state.items():
        block, first = _REGNET_BLOCK.match(name), _REGNET_STEM.match(name)
        if first:
            renamed[f"embedder.embedder.{(_CONV, _NORM)[int(first[1])]}.{first[2]}"] = tensor
            stem = tensor if tensor.ndim == 4 else stem
        elif block and block[3] in _REGNET_LAYER:
            stage = int(block[1]) - 1
            renamed[f"encoder.stages.{stage}.layers.{block[2]}.{_REGNET_LAYER[block[3]]}.{block[4]}"] = tensor
            if block[3] == "f.b.0" and tensor.ndim == 4:
                depths[stage], grouped[stage] = depths[stage] + 1, tensor
        elif not name.startswith(("fc.", "head.")):
            raise ValueError(
                f"tensor {name!r} is not part of a RegNetY under torchvision's or SWAG's names; known in a block: "
                f"{', '.join(_REGNET_LAYER)}. Give a transformers folder (config.json + safetensors) for other models."
            )
    if not grouped or stem is None or not any(".f.se." in name for name in state):
        raise ValueError(
            "a RegNet file must hold a RegNetY (with squeeze and excitation) under torchvision's or SWAG's names: "
            "stem.0.weight and trunk_output.block1.block1-0.f.b.0.weight and their like"
        )
    # the number of batches, which only training statistics use and some files leave out
    counted = {name.replace("running_mean", "num_batches_tracked") for name in renamed if name.endswith("running_mean")}
    stages = sorted(grouped)
    architecture = {
        "embedding_size": stem.shape[0],
        "hidden_sizes": [grouped[stage].shape[0] for stage in stages],
        "depths": [depths[stage] for stage in stages],
        "groups_width": grouped[stages[0]].shape[1],  # (out, in / groups, 3, 3)
        "layer_type": "y",
    }
    return architecture, renamed | {name: torch.tensor(0) for name in counted}

"""RegNetY under the names of torchvision or SWAG -> `RegNetModel` of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]


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

"""Load third-party models without running their code: allow-listed config fields, and weights as plain tensors.

    config, kind = folder_config(folder)                   # a transformers config, built here
    state = folder_tensors(folder)
    model, info = fill(ViTModel, config, state)

A config.json can name code (`auto_map`), kernels to download (`_attn_implementation`), adapters and quantisers. None of
these reach a loader: only fields that the model type's own config class declares are used, and only plain values.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.common.files import refuse_pipe
from patchgen.common.reading import read_json
from patchgen.common.tensors import read_tensors

INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"
LONGEST = 1000  # maximum length of a list in a config


def allowed(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `given` with plain values that the config class `kind` declares itself, not its base class."""
    from transformers import PreTrainedConfig

    shared = {f.name for f in dataclasses.fields(PreTrainedConfig)}  # type: ignore[arg-type]
    own = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
    names = {name for name in own - shared if not name.startswith("_")}
    return {name: value for name, value in given.items() if name in names and _is_plain(value)}


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < 3 and len(value) <= LONGEST and all(_is_plain(member, depth + 1) for member in value)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 100)


def config_of(model_type: Any, given: Mapping[str, Any], **more: Any) -> Any:
    """The transformers config of a model type, built from the allowed fields."""
    from transformers import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model type {str(model_type)[:60]!r}")
    kind = CONFIG_MAPPING[model_type]
    return kind(**allowed(kind, given), **more)


def vision_part(about: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Model type and config fields of the vision model; for a two-tower model, those of the image tower."""
    from transformers import CONFIG_MAPPING

    model_type, inner = about.get("model_type"), about.get("vision_config")
    if not isinstance(inner, dict):
        return str(model_type), about
    parts = (
        CONFIG_MAPPING[model_type].sub_configs if isinstance(model_type, str) and model_type in CONFIG_MAPPING else {}
    )
    usual = parts["vision_config"].model_type if "vision_config" in parts else ""
    return str(inner.get("model_type") or usual), inner


def fill(model: Any, config: Any, state: dict[str, Tensor], **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model with these tensors, including names of earlier transformers versions; also returns what is missing."""
    found = model.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        **more,
    )
    return found[0], found[1]


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights of a transformers folder: a single file, shards with an index, or an older PyTorch file."""
    files = [folder / "model.safetensors"]
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map")
        names = {str(name) for name in named.values()} if isinstance(named, dict) else set()
        if odd := [name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", name)]:
            raise ValueError(f"{folder / INDEX} names the file {odd[0][:60]!r}, which is not one of its folder")
        files = [folder / name for name in sorted(names)]
    elif not files[0].is_file():
        files = sorted(folder.glob("model*.safetensors"))
    if files:
        return {name: tensor for file in files for name, tensor in read_tensors(file)[0].items()}
    refuse_pipe(folder / PICKLE)
    state = torch.load(io.BytesIO((folder / PICKLE).read_bytes()), weights_only=True, map_location="cpu")
    return {str(name): tensor for name, tensor in dict(state).items() if isinstance(tensor, Tensor)}

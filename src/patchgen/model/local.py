"""Backbones in local files: their tensors, their path, and a digest of their content that does not depend on the path.

folder_tensors(Path("weights/vit"))           # {"encoder.layer.0.norm1.weight": ...}
local_path("weights/vit")                     # the folder; None for a name such as "auto", or if it does not exist
content("weights/vit")                        # "sha256:...", the same after a move and for an exact copy
"""

import hashlib
import io
import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.common.files import refuse_pipe
from patchgen.common.text import first_line
from patchgen.common.untrusted import read_json, read_tensors
from patchgen.model.preprocessing import NESTED, is_nested

if TYPE_CHECKING:
    from torch import Tensor

INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"
# the files of a folder that define a model: weights, architecture, mean and std, and CLIP's tokenizer
DEFINING = ("config.json", "preprocessor_config.json", "model*.safetensors*", PICKLE, "*token*.json", "vocab.json",
            "merges.txt")  # fmt: skip


def has_weights(folder: Path) -> bool:
    """True if a transformers folder holds a weight file."""
    return any(folder.glob("model*.safetensors")) or (folder / PICKLE).is_file()


def folder_tensors(folder: Path) -> "dict[str, Tensor]":
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
    if not files:
        return _unpickled(folder / PICKLE)
    return {name: tensor for file in files for name, tensor in read_tensors(file)[0].items()}


def _unpickled(path: Path) -> "dict[str, Tensor]":
    """The tensors of an older PyTorch file, without running its code; none is larger than its data."""
    import torch

    refuse_pipe(path)
    try:
        state = dict(torch.load(io.BytesIO(path.read_bytes()), weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises many types on damaged or foreign pickles
        raise ValueError(f"{path} cannot be read as a file of weights ({first_line(error)})") from error
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name[:60]} is no plain tensor; save the weights as safetensors")
    return tensors


def local_path(source: str) -> Path | None:
    """The folder or file that `load_backbone` would read for this source, if it is one and exists."""
    path = os.path.expanduser(source)
    if not source or not os.path.exists(path):
        return None
    from patchgen.model.backbone import BACKBONES
    from patchgen.model.timm import PREFIX

    is_name = source == "auto" or source in BACKBONES or source.startswith(PREFIX)
    return None if is_name else Path(path)


def content(source: str) -> str | None:
    """A digest of a local backbone's files; None if there are none or they cannot be read (loading reports that)."""
    path = local_path(source)
    if path is None:
        return None
    try:
        if path.is_file():
            return f"sha256:{_digest(path)}"
        patterns = (*DEFINING, NESTED) if is_nested(path) else DEFINING
        files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
        lines = "".join(f"{_digest(file)}  {file.name}\n" for file in files)
    except OSError:
        return None
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}" if files else None


def _digest(file: Path) -> str:
    about = file.stat()
    return _read(os.path.abspath(file), about.st_size, about.st_mtime_ns)


@cache
def _read(file: str, size: int, modified: int) -> str:
    """sha256 of a file, read once per process until it changes: every run of a sweep is named by it."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Checkpoints: one safetensors file each, with its facts and a checksum of both in the header."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from patchgen.common.files import replacing
from patchgen.common.tensors import read_tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write one safetensors file with its facts as JSON in the header, atomically.

    The facts begin with a checksum of both, because the format has none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"crc32": _checksum(whole, meta), **meta}
    try:
        with replacing(path) as temporary:
            save_file(whole, temporary, metadata={"patchgen": json.dumps(facts)})
    except SafetensorError as error:  # raised on a full disk
        raise OSError(f"{path} cannot be written ({error}); free some space and run the same command again") from error


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        tensors, header = read_tensors(path)
        meta = dict(json.loads(header["patchgen"]))
        if meta.pop("crc32", None) not in (None, _checksum(tensors, meta)):  # older files have none
            raise ValueError("its checksum does not match")
        return tensors, meta
    except (KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise ValueError(
            f"{path} is damaged or not a PatchGen checkpoint ({error!s:.300}); use another checkpoint of this "
            "run, or delete the run's folder and train again"
        ) from error


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    import torch

    crc = zlib.crc32(json.dumps(meta).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)  # type: ignore[arg-type]
    return crc

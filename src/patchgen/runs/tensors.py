"""Checkpoints and predictions: one safetensors file each, with its facts and a checksum of both in the header."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from patchgen.common.files import replacing
from patchgen.common.untrusted import read_tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write one safetensors file atomically, with its facts and a checksum, which the format lacks, in the header."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"crc32": _checksum(stored, meta), **meta}
    write_tensors(path, stored, {"patchgen": json.dumps(facts)})


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write one safetensors file of contiguous tensors on the CPU, atomically; OSError if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, header)
    except SafetensorError as error:
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


class Predictions(NamedTuple):
    """What a run's checkpoint predicts for the images of its unseen domain, in the order of the table."""

    rows: np.ndarray  # (n,) int64, rows of the run's table
    label: np.ndarray  # (n,) int64, the true class
    probabilities: np.ndarray  # (n, C) float32, over the outputs of the classifier


def predictions_file(run: Path, checkpoint: str) -> Path:
    return run / f"{checkpoint}_predictions.safetensors"


def save_predictions(run: Path, checkpoint: str, predictions: Predictions, classes: Sequence[str]) -> None:
    """Write the predictions of a checkpoint into the run folder `run`; `classes` are the names of the outputs."""
    import torch

    tensors = {name: torch.from_numpy(values) for name, values in predictions._asdict().items()}
    save_tensors(predictions_file(run, checkpoint), tensors, {"classes": list(classes)})


def read_predictions(run: Path, checkpoint: str = "selected") -> Predictions | None:
    """The predictions that a finished run saved for its unseen domain; None if it has none, or the file is damaged."""
    try:
        tensors, _ = load_tensors(predictions_file(run, checkpoint))
        rows, label, probabilities = (tensors[name].numpy() for name in Predictions._fields)
    except (ValueError, KeyError, TypeError):
        return None
    fits = rows.shape == label.shape == probabilities.shape[:1] and probabilities.ndim == 2
    return Predictions(rows, label, probabilities) if fits else None


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

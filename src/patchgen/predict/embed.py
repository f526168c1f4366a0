"""Embed images: feature vectors of a model, with the image names, in one file for other tools.

    found = embed(load_predictor("tiles-model"), paths, ("features", "cls", "mean"))
    write_columns("tiles.parquet", {"path": names, **found.vectors})           # or tiles.npz

`features` is the input of the head (z+ with PatchGen, the selective class token with patchgen-select); `cls` and `mean`
are the class token and the mean patch token of the same tuned backbone, without any selection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from patchgen.common.files import replacing
from patchgen.data.images import UnreadableImage, decode
from patchgen.predict.predictor import Predictor, Unreadable

Vector = Literal["features", "cls", "mean"]
FORMATS = (".parquet", ".npz")


class Embedded(NamedTuple):
    rows: list[int]  # positions of the images that could be read
    vectors: dict[str, np.ndarray]  # name -> (N, D) float32, one row per image
    failed: list[Unreadable]


def check_target(path: Path) -> None:
    """Raise ValueError before any work if the file cannot be written."""
    if path.suffix not in FORMATS or path.is_dir():
        raise ValueError(f"--out must be a file that ends in {' or '.join(FORMATS)}, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: the folder {path.parent} does not exist; make it first")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError(
            "Parquet needs pyarrow: install it with `pip install 'patchgen[parquet]'`, or let --out end in .npz"
        )


def embed(
    predictor: Predictor, paths: Sequence[Path], what: Sequence[str] = ("features",), batch: int = 64,
    tick: Callable[[int], None] = lambda count: None,
) -> Embedded:  # fmt: skip
    """Vectors of images; those that cannot be read are left out and named."""
    rows, failed, parts = list[int](), list[Unreadable](), {name: list[np.ndarray]() for name in what}
    for start in range(0, len(paths), batch):
        images, part = [], paths[start : start + batch]
        for row, path in enumerate(part, start):
            try:
                images.append(decode(path, predictor.config.image_size, predictor.interpolation))
                rows.append(row)
            except UnreadableImage as error:
                failed.append(Unreadable.because(path, error))
        if images:
            for name, vectors in vectors_of(predictor, images, what).items():
                parts[name].append(vectors)
        tick(len(part))
    return Embedded(rows, {name: np.concatenate(found) for name, found in parts.items() if found}, failed)


@torch.inference_mode()
def vectors_of(predictor: Predictor, images: Sequence[np.ndarray], what: Sequence[str]) -> dict[str, np.ndarray]:
    """Name -> (B, D) float32 of images (S, S, 3) uint8."""
    inputs, found = predictor.inputs(images), {}
    if "features" in what:
        found["features"] = predictor.model(inputs).features
    if {"cls", "mean"} & {*what}:
        tokens = predictor.model.backbone(inputs)
        found |= {"cls": tokens.cls, "mean": tokens.patches.mean(1)}
    return {name: found[name].float().cpu().numpy() for name in what}


def write_columns(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write one row per image; a column is (N,) or (N, D). No pickle is written."""
    with replacing(path) as temporary:
        if Path(path).suffix == ".npz":
            with temporary.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **columns)
            return
        import pyarrow
        from pyarrow import parquet

        def column(values: np.ndarray) -> pyarrow.Array:
            flat = pyarrow.array(values.reshape(-1))
            return pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1]) if values.ndim == 2 else flat

        table = pyarrow.table({name: column(values) for name, values in columns.items()})
        parquet.write_table(table, temporary)

"""Embed images: feature vectors of a model, with the image names, in one file for other tools.

`features` is the input of the head (z+ with PatchGen); `cls` and `mean` are the class token and the mean patch token.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from patchgen.common.files import expanded, replacing
from patchgen.common.reading import BATCH
from patchgen.config import NO_DOMAIN, Config
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.model.backbone import load_backbone
from patchgen.predict.predictor import NOT_FINITE, Checkpoint, Predictor, Unreadable, finite_rows, load_predictor
from patchgen.runs.folder import is_model_folder

FORMATS = (".parquet", ".npz")


class Embedded(NamedTuple):
    rows: list[int]  # positions of the images that could be read
    vectors: dict[str, np.ndarray]  # name -> (N, D) float32, one row per image
    failed: list[Unreadable]


def require_parquet(path: Path) -> None:
    """Raise ValueError before any work if the file is Parquet, and pyarrow is missing."""
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow: `pip install 'patchgen[parquet]'`, or let --out end in .npz")


def load_embedder(
    source: str, checkpoint: Checkpoint = "selected", image_size: int = 224, *, backbone: str | None = None,
    allow_download: bool = False, **device: Any,
) -> Predictor:  # fmt: skip
    """A model or run folder; or a bare encoder of this `image_size`: a name, hub id, folder or weight file."""
    path = expanded(source)
    if is_model_folder(path) or (path / "config.yaml").is_file():
        return load_predictor(path, checkpoint, backbone=backbone, allow_download=allow_download, **device)
    if path.parent != Path() and path.parent.is_dir() and not path.exists():  # a mistyped path is not a hub id
        raise ValueError(f"there is no model, run or encoder {source}; check the path")
    config = Config("", NO_DOMAIN, method="lp", backbone=source, image_size=image_size)
    encoder = load_backbone(source, image_size=image_size)
    return Predictor(build_on(encoder, config, make_method(config), 1), ("none",), config, **device)


def embed(
    predictor: Predictor, paths: Sequence[Path], what: Sequence[str] = ("features",), batch: int = BATCH,
    tick: Callable[[int], None] | None = None,
) -> Embedded:  # fmt: skip
    """Vectors of images; those that cannot be read, and those with vectors that are not finite, are named instead."""

    def vectors(images: list[np.ndarray], paths: list[Path]) -> list[list[np.ndarray] | Unreadable]:
        columns = vectors_of(predictor, images, what).values()
        rows = zip(paths, finite_rows(*columns), *columns, strict=True)
        return [vectors if finite else Unreadable(path, NOT_FINITE) for path, finite, *vectors in rows]

    answers = list(predictor.each(paths, vectors, batch, tick))
    embedded = {row: answer for row, answer in enumerate(answers) if not isinstance(answer, Unreadable)}
    columns = zip(what, zip(*embedded.values(), strict=True), strict=True) if embedded else ()
    failed = [answer for answer in answers if isinstance(answer, Unreadable)]
    return Embedded(list(embedded), {name: np.stack(column) for name, column in columns}, failed)


@torch.inference_mode()
def vectors_of(predictor: Predictor, images: Sequence[np.ndarray], what: Sequence[str]) -> dict[str, np.ndarray]:
    """Name -> (B, D) float32 of images (S, S, 3) uint8."""
    vectors = {}
    if "features" in what:
        vectors["features"] = predictor.computed(images).features
    if {"cls", "mean"} & {*what}:
        with predictor.autocast():
            tokens = predictor.model.backbone(predictor.inputs(images))
        vectors["cls"] = tokens.cls.float().cpu().numpy()
        vectors["mean"] = tokens.patches.mean(1).float().cpu().numpy()
    return {name: vectors[name] for name in what}


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

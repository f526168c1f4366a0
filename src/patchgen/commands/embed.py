"""patchgen embed MODEL DATA --out FILE.parquet: vectors of images with path, domain, label and group as columns."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from patchgen.commands import COUNT, announce, check_bounds, check_file
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.options import ImageOptions, ModelOptions
from patchgen.common.files import expanded
from patchgen.common.text import printable

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class EmbedArguments(ImageOptions, ModelOptions):
    """Write the feature vectors of images, one row per image, for other tools."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, run folder of `patchgen train`, or a bare encoder: a name, hub id or folder."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA...")]
    """Folder `domain/class/*.jpg` or CSV manifest; or image files, folders and patterns, which have only paths."""
    out: str
    """The .parquet or .npz file to write."""
    what: tuple[Literal["features", "cls", "mean"], ...] = ("features",)
    """`features` the head reads (z+ with PatchGen); class token and mean patch token of the tuned backbone."""
    coordinates: Literal["auto", "umap", "pca"] | None = None
    """Add columns x and y: a 2D projection of the first of these vectors; `auto` is UMAP if it is installed."""
    image_size: int = 224
    """Of a bare encoder: images are resized to this square; a trained model has its own size."""
    batch: int = 64
    """Images per forward pass."""


def read_rows(words: tuple[str, ...]) -> tuple[list[Path], dict[str, list[str]]]:
    """The files, and the columns that describe them: domain, label and group if the data has them."""
    from patchgen.data.table import read_table

    one = expanded(words[0]) if len(words) == 1 else None
    if one is not None and (one.suffix == ".csv" or (one.is_dir() and any(one.glob("*/*/*")))):
        table = read_table(one)
        names = {
            "domain": [table.domains[i] for i in table.domain],
            "label": [table.classes[i] if i >= 0 else "" for i in table.label],
        }
        return table.files, names | ({"group": [*table.group]} if table.group else {})
    return find_images(words), {}


def embed_images(arguments: EmbedArguments) -> int:
    check_bounds(arguments, batch=COUNT)
    if not arguments.what:
        raise ValueError("--what must name at least one of features, cls, mean")
    from patchgen.predict.embed import FORMATS, embed, load_embedder, require_parquet, write_columns

    target = check_file(arguments.out, "--out", *FORMATS)
    require_parquet(target)
    if arguments.coordinates:
        from patchgen.diagnose.geometry import require_projection

        require_projection(arguments.coordinates)
    announce()
    paths, names = read_rows(arguments.images)
    from patchgen.common.progress import Progress

    predictor = load_embedder(arguments.model, arguments.checkpoint, arguments.image_size, **arguments.how)
    with Progress("embedding", len(paths)) as bar:
        found = embed(predictor, paths, tuple(dict.fromkeys(arguments.what)), arguments.batch, bar.tick)
    if found.rows:
        texts = {"path": [printable(path) for path in paths], **names}
        columns = _texts(texts, found.rows) | found.vectors
        if arguments.coordinates:
            columns |= _plane(found.vectors[arguments.what[0]], arguments.coordinates)
        write_columns(target, columns)
        print(printable(target))
    return report_unreadable(found.failed, len(paths), arguments.strict)


def _texts(texts: dict[str, list[str]], rows: list[int]) -> "dict[str, np.ndarray]":
    import numpy as np

    return {name: np.array([values[row] for row in rows], dtype=str) for name, values in texts.items()}


def _plane(vectors: "np.ndarray", how: Literal["auto", "umap", "pca"]) -> "dict[str, np.ndarray]":
    from patchgen.diagnose.geometry import flat

    points, way = flat(vectors, how)
    print(f"x and y: {way}")
    return {"x": points[:, 0].astype("float32"), "y": points[:, 1].astype("float32")}


COMMAND = embed_images

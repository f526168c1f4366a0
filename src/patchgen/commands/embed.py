"""patchgen embed MODEL DATA --out FILE.parquet: vectors of images with path, domain, label and group as columns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from patchgen.commands import check_file
from patchgen.commands.options import ImageOptions, ModelOptions, find_images, report_unreadable
from patchgen.common.files import expanded
from patchgen.common.text import printable


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
            "label": [table.label_name(i) for i in range(len(table))],
        }
        return table.files, names | ({"group": [*table.group]} if table.group else {})
    return find_images(words), {}


def embed_images(arguments: EmbedArguments) -> int:
    if not arguments.what:
        raise ValueError("--what must name at least one of features, cls, mean")
    import numpy as np

    from patchgen.common.progress import Progress
    from patchgen.diagnose.geometry import flat, require_projection
    from patchgen.predict.embed import FORMATS, embed, load_embedder, require_parquet, write_columns

    target = check_file(arguments.out, "--out", *FORMATS)
    require_parquet(target)
    if arguments.coordinates:
        require_projection(arguments.coordinates)
    paths, names = read_rows(arguments.images)
    predictor = load_embedder(arguments.model, arguments.checkpoint, arguments.image_size, **arguments.how)
    with Progress("embedding", len(paths)) as bar:
        found = embed(predictor, paths, tuple(dict.fromkeys(arguments.what)), arguments.batch, bar.tick)
    if found.rows:
        texts = {"path": [printable(path) for path in paths], **names}
        columns = {name: np.array([values[row] for row in found.rows], dtype=str) for name, values in texts.items()}
        columns |= found.vectors
        if arguments.coordinates:
            points, method = flat(found.vectors[arguments.what[0]], arguments.coordinates)
            print(f"x and y: {method}")
            columns |= {"x": points[:, 0].astype("float32"), "y": points[:, 1].astype("float32")}
        write_columns(target, columns)
        print(printable(target))
    return report_unreadable(found.failed, len(paths), arguments.strict)


COMMAND = embed_images

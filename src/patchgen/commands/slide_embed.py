"""patchgen slide embed MODEL SLIDES... --out DIR: feature vectors of the tiles of slides, one file per slide."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchgen.commands import announce, parse
from patchgen.commands.slide import (
    SlideArguments,
    checked_slides,
    find_tiles,
    process_slides,
    report_slides,
    tile_settings,
    with_scale,
)
from patchgen.commands.slide import load_model as load_trained_model
from patchgen.common.files import expanded, write_text
from patchgen.common.text import printable

if TYPE_CHECKING:
    from patchgen.predict.predictor import Predictor
    from patchgen.slides.slide import Slide


@dataclass(frozen=True)
class SlideEmbedArguments(SlideArguments):
    """Write the feature vectors of all tiles with tissue, with their places: a file per slide, for other tools."""

    what: tuple[Literal["features", "cls", "mean"], ...] = ("features",)
    """`features` the head reads (z+ with PatchGen); class token and mean patch token of the tuned backbone."""
    format: Literal["npz", "parquet"] = "npz"
    """The kind of file; Parquet needs the extra `parquet`."""
    image_size: int = 224
    """Of a bare encoder (a name, hub id or folder): tiles are resized to this square."""


def load_model(arguments: SlideEmbedArguments) -> tuple[Predictor, str]:
    """The trained model or bare encoder, and its digest."""
    from patchgen.runs.folder import is_model_folder

    path = expanded(arguments.model)
    if is_model_folder(path) or (path / "config.yaml").is_file():
        return load_trained_model(arguments)
    predictor = _load_encoder(arguments.model, arguments.image_size, *arguments.device.values())
    return predictor, predictor.model.backbone.digest()[:16]


@lru_cache(1)
def _load_encoder(source: str, image_size: int, accelerator: Any, precision: Any) -> Predictor:
    from patchgen.predict.embed import load_embedder

    return load_embedder(source, image_size=image_size, accelerator=accelerator, precision=precision)


def embed_slide(folder: Path, arguments: dict[str, Any], slide: str, result: str, quiet: bool) -> None:
    """Embed one slide; `result` appears when it is complete.

    Raises:
        UnreadableSlide: the slide cannot be used, or shows no tissue.
    """
    import numpy as np

    from patchgen.common.progress import Progress
    from patchgen.predict.embed import vectors_of, write_columns
    from patchgen.predict.predictor import NOT_FINITE
    from patchgen.slides.scan import read_batches
    from patchgen.slides.slide import UnreadableSlide, open_slide

    options = SlideEmbedArguments(**{**arguments, "what": tuple(arguments["what"])})
    predictor, digest = load_model(options)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in options.what}
    with open_slide(slide, options.mpp_slide) as opened:
        grid, _, _, places = find_tiles(opened, options)
        with Progress(printable(Path(slide).name), len(places), quiet=quiet) as bar:
            for _, pixels in read_batches(opened, grid, places, predictor, options.batch, bar.tick):
                for name, vectors in vectors_of(predictor, pixels, options.what).items():
                    if not np.isfinite(vectors).all():
                        raise UnreadableSlide(slide, NOT_FINITE)
                    parts[name].append(vectors)
        settings = _settings(options, predictor, opened, digest)
    boxes = np.array([grid.box(place.column, place.row) for place in places])
    columns = {"column": [p.column for p in places], "row": [p.row for p in places], "x": boxes[:, 0], "y": boxes[:, 1],
               "width": boxes[:, 2] - boxes[:, 0], "height": boxes[:, 3] - boxes[:, 1]}  # fmt: skip
    table = {name: np.asarray(values, dtype=np.int64) for name, values in columns.items()}
    table["tissue"] = np.array([place.tissue for place in places], dtype=np.float32)
    write_text(Path(result).with_suffix(".json"), json.dumps(settings, indent=2) + "\n")
    write_columns(result, table | {name: np.concatenate(vectors) for name, vectors in parts.items()})


def main(argv: list[str]) -> int:
    arguments = parse(SlideEmbedArguments, "slide embed", argv)
    slides, out = checked_slides(arguments), Path(arguments.out)
    if arguments.runtime not in ("auto", "torch") or not arguments.what:
        raise ValueError("`slide embed` uses torch; leave --runtime out, and name a vector with --what")
    announce()
    from patchgen.common.machine import use_threads
    from patchgen.predict.embed import check_target

    if arguments.alone:
        use_threads(arguments.threads)
    predictor, digest = load_model(arguments)
    arguments = with_scale(arguments, predictor)
    out.mkdir(parents=True, exist_ok=True)
    check_target(out / f"x.{arguments.format}")
    _, failures = process_slides(
        arguments, slides, predictor, "patchgen.commands.slide_embed:embed_slide",
        lambda result: result.with_suffix(".json"),
        lambda slide: _settings(arguments, predictor, slide, digest),
        f".{arguments.format}",
    )  # fmt: skip
    return report_slides(failures, len(slides), arguments.strict)


def _settings(arguments: SlideEmbedArguments, predictor: Predictor, slide: Slide, digest: str) -> dict[str, Any]:
    return tile_settings(arguments, predictor, slide, digest) | {"what": list(arguments.what)}

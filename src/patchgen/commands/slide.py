"""patchgen slide MODEL SLIDE... --out DIR: maps of whole slides as PNG, pyramid TIFF, CSV and GeoJSON for QuPath."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, parse
from patchgen.commands.predict import choose_pass, report_unreadable, shown, ticker
from patchgen.common.files import write_text

if TYPE_CHECKING:
    import numpy as np

    from patchgen.predict.predictor import Predictor
    from patchgen.slides.slide import Slide, UnreadableSlide
    from patchgen.slides.tiles import TileGrid

DESCRIPTION = "slide.json"
TILES = "tiles.csv"


@dataclass(frozen=True)
class SlideArguments:
    """Predict whole slides tile by tile: a folder a slide with tiles.csv, tiles.geojson and a map of each class."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN")]
    """Model folder, as `patchgen fit` prints it, or run folder, as `patchgen train` does."""
    slides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES...")]
    """Slide files: .svs, .ndpi, .mrxs, .scn, .tif and whatever else OpenSlide reads."""
    out: str
    """Folder for the results; made when missing. The same command goes on where a stopped one ended."""
    mpp: float = 0.5
    """Resolution of the tiles in microns a pixel: that of the images the model was trained on (0.5 is 20x)."""
    tile: int = 224
    """Side of a tile in pixels at that resolution: how much tissue an image of the training data showed."""
    mpp_slide: float | None = None
    """Microns a pixel of the slides themselves, where the files do not say it or are wrong."""
    min_tissue: float = 0.5
    """Tiles with a smaller share of tissue are left out."""
    checkpoint: Literal["selected", "swad"] = "selected"
    """Of a run: the checkpoint chosen on source validation, or the weight average of --swad."""
    strict: bool = False
    """Exit with code 1 when any slide could not be used, not only when all could not."""
    batch: int = 64
    """Tiles a forward pass."""
    runtime: Literal["auto", "torch", "onnx", "openvino"] = "torch"
    """What computes the answers; `auto` is the fastest one that is installed and agrees with torch on this machine."""
    drop_unselected: bool = False
    """Let patches below 0.5 in the mask leave the backbone (patchgen-select): faster, and less accurate."""
    drop_after: int | None = None
    """How many blocks they pass before they leave; a third of them when left out. More is slower and more accurate."""


def _check(arguments: SlideArguments) -> None:
    """Refuse before any work what holds for every slide."""
    if not arguments.slides:
        raise ValueError("no slide given; name slide files after the model")
    if not 0 <= arguments.min_tissue <= 1:
        raise ValueError(f"--min-tissue is a share from 0 to 1, not {arguments.min_tissue}")
    for name in ("mpp", "mpp_slide", "tile", "batch"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    if Path(arguments.out).exists() and not Path(arguments.out).is_dir():
        raise ValueError(f"--out must be a folder, but {arguments.out} is a file")
    stems = [Path(word).stem for word in arguments.slides]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise ValueError(f"two slides are called {twice[0]!r} and would share a folder; give them a command each")


def _settings(arguments: SlideArguments, predictor: Predictor, slide: Slide, digest: str) -> dict[str, Any]:
    """What decides the tiles and their predictions."""
    return {
        "slide": slide.path.name,
        "bytes": slide.path.stat().st_size,
        "slide_mpp": list(slide.mpp),
        "mpp": arguments.mpp,
        "tile": arguments.tile,
        "min_tissue": arguments.min_tissue,
        "image_size": predictor.config.image_size,
        "classes": list(predictor.classes),
        "model": digest,
    }


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Begin a slide's folder, or go on with one of the same settings."""
    file = folder / DESCRIPTION
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(file, settings)
        return
    try:
        was = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove {folder}, or choose another --out") from error
    other = [name for name, value in settings.items() if was.get(name) != value]
    if other:
        change = f"{other[0]} {was.get(other[0])!r}, now {settings[other[0]]!r}"
        raise ValueError(f"{folder} was begun with other settings ({change}); remove it, or choose another --out")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_text(file, json.dumps(content, indent=2) + "\n")


def process(arguments: SlideArguments, predictor: Predictor, path: Path, digest: str) -> Path:
    """Everything of one slide; returns its folder.

    Raises:
        UnreadableSlide: the slide cannot be used, or shows no tissue.
    """
    from PIL import Image

    from patchgen.common.progress import Progress
    from patchgen.slides.heatmap import save_png
    from patchgen.slides.scan import find_places, scan
    from patchgen.slides.slide import UnreadableSlide, open_slide
    from patchgen.slides.tiles import make_grid, thumbnail
    from patchgen.slides.tissue import tissue_mask, tissue_share

    with open_slide(path, arguments.mpp_slide) as slide:
        grid = make_grid(slide, arguments.mpp, arguments.tile)
        small = thumbnail(slide, grid)
        mask = tissue_mask(small, grid.cell**2 / 4)
        places = find_places(tissue_share(mask, grid), arguments.min_tissue)
        if not places:
            raise UnreadableSlide(
                path, f"no tile has {arguments.min_tissue:.0%} tissue; lower --min-tissue, or check --mpp and --tile"
            )
        folder, settings = Path(arguments.out) / path.stem, _settings(arguments, predictor, slide, digest)
        _claim(folder, settings)
        save_png(folder / "tissue.png", Image.fromarray(mask))
        with Progress(shown(path.name), len(places)) as bar:
            scan(predictor, slide, grid, places, folder / TILES, arguments.batch, ticker(bar))
        files = _write_results(folder, predictor.classes, grid, small, slide.mpp)
        facts = {"tiles": len(places), "origin": list(slide.origin), "files": files}
    _write_json(folder / DESCRIPTION, settings | facts)
    return folder


def _write_results(
    folder: Path, classes: Sequence[str], grid: TileGrid, small: np.ndarray, mpp: tuple[float, float]
) -> dict[str, list[str]]:
    """Shapes and maps from the CSV alone; the names of the maps' files."""
    from patchgen.slides.geojson import write_geojson
    from patchgen.slides.heatmap import collect_maps, write_map
    from patchgen.slides.scan import read_tiles

    write_geojson(folder / "tiles.geojson", read_tiles(folder / TILES, classes), classes)
    maps = collect_maps(read_tiles(folder / TILES, classes), grid, classes)
    files = {}
    for i, (name, values) in enumerate(maps.items()):
        plain = re.sub(r"[^\w-]+", "_", name)[:48]  # two classes may read alike in plain letters: hence the number
        files[name] = write_map(folder / f"map_{i:02d}_{plain}", name, values, grid, small, mpp)
    return files


def main(argv: list[str]) -> int:
    arguments = parse(SlideArguments, "slide", argv)
    _check(arguments)
    announce()
    from patchgen.predict.predictor import identity, load_predictor
    from patchgen.slides.slide import UnreadableSlide, require_openslide

    require_openslide()
    predictor = load_predictor(arguments.model, arguments.checkpoint)
    choose_pass(predictor, arguments.runtime, arguments.drop_unselected, arguments.drop_after)
    digest = " ".join([identity(arguments.model, arguments.checkpoint)[:16], predictor.variant]).strip()
    failed = list["UnreadableSlide"]()
    for word in arguments.slides:
        try:
            print(process(arguments, predictor, Path(word), digest), flush=True)
        except UnreadableSlide as error:
            failed.append(error)
    return report_unreadable(failed, len(arguments.slides), arguments.strict, "slides could not be read")

"""patchgen slide MODEL SLIDE... --out DIR: maps of whole slides as PNG, pyramid TIFF, CSV and GeoJSON for QuPath.

`patchgen slide tiles` (`slide_tiles.py`) makes training data from slides.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import announce, parse
from patchgen.commands.engine import EngineArguments
from patchgen.commands.inputs import report_unreadable
from patchgen.commands.model_options import RuntimeOptions
from patchgen.common.files import refuse_links, write_text
from patchgen.common.text import json_text, printable
from patchgen.common.untrusted import read_json, shortly

if TYPE_CHECKING:
    import numpy as np

    from patchgen.predict.predictor import Predictor
    from patchgen.slides.slide import Slide
    from patchgen.slides.tiles import TileGrid
    from patchgen.sweep.unit import Unit

DESCRIPTION = "slide.json"
TILES = "tiles.csv"
ACTIONS = ("tiles",)  # `patchgen slide tiles`
WORK, PART = ".work", "part"  # the parent of unfinished slides, and the folder of partial results


@dataclass(frozen=True)
class SlideArguments(RuntimeOptions, EngineArguments):
    """Predict whole slides tile by tile: a folder per slide with tiles.csv, tiles.geojson and a map of each class.

    See `patchgen slide tiles --help` for cutting slides into labelled tiles for training.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN")]
    """Model folder, as `patchgen fit` prints it, or run folder, as `patchgen train` does."""
    slides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES...")]
    """Slide files: .svs, .ndpi, .mrxs, .scn, .tif and other formats that OpenSlide reads; or folders of them."""
    out: str
    """Folder for the results; created if missing. Resumable with the same command."""
    mpp: float = 0.5
    """Resolution of the tiles in microns per pixel: that of the images the model was trained on (0.5 is 20x)."""
    tile: int = 224
    """Side of a tile in pixels at that resolution, to match the field of view of the training images."""
    mpp_slide: float | None = None
    """Microns per pixel of the slides themselves, if missing or wrong in the files."""
    min_tissue: float = 0.5
    """Tiles with a smaller share of tissue are left out."""
    strict: bool = False
    """Exit with code 1 if any slide could not be used, not only if none could."""
    batch: int = 64
    """Tiles per forward pass."""


def _check(arguments: SlideArguments) -> None:
    """Check the options that apply to all slides, before any work."""
    if not arguments.slides:
        raise ValueError("no slide given; name slide files after the model")
    arguments.check_engine()
    if not 0 <= arguments.min_tissue <= 1:
        raise ValueError(f"--min-tissue is a share from 0 to 1, not {arguments.min_tissue}")
    for name in ("mpp", "mpp_slide", "tile", "batch"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    if Path(arguments.out).exists() and not Path(arguments.out).is_dir():
        raise ValueError(f"--out must be a folder, but {arguments.out} is a file")


def _settings(arguments: SlideArguments, predictor: Predictor, slide: Slide, digest: str) -> dict[str, Any]:
    """The settings that the tiles and their predictions depend on."""
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


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the folder exists and was started with other settings."""
    file = folder / DESCRIPTION
    if not file.is_file():
        return
    refuse_links(folder)
    try:
        was = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove {folder}, or choose another --out") from error
    other = [name for name, value in settings.items() if was.get(name) != value]
    if other:
        change = f"{other[0]} {shortly(was.get(other[0]))}, now {shortly(settings[other[0]])}"
        raise ValueError(f"{folder} was started with other settings ({change}); remove it, or choose another --out")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_text(file, json_text(content) + "\n")


def _model(arguments: SlideArguments) -> tuple[Predictor, str]:
    """The predictor and its digest, loaded once for all slides of this process."""
    from patchgen.predict.predictor import identity

    predictor = arguments.load_once(arguments.model)
    return predictor, " ".join([identity(arguments.model, arguments.checkpoint)[:16], predictor.variant]).strip()


def map_slide(folder: Path, arguments: dict[str, Any], slide: str, result: str, quiet: bool) -> None:
    """Process one slide; `folder` has the partial results, and `result` appears when it is complete.

    Raises:
        UnreadableSlide: the slide cannot be used, or shows no tissue.
    """
    from PIL import Image

    from patchgen.common.progress import Progress
    from patchgen.slides.cohort import save_thumbnail
    from patchgen.slides.heatmap import save_png
    from patchgen.slides.scan import find_places, scan
    from patchgen.slides.slide import UnreadableSlide, open_slide
    from patchgen.slides.tiles import make_grid, thumbnail
    from patchgen.slides.tissue import tissue_mask, tissue_share

    given, path, part = SlideArguments(**arguments), Path(slide), folder / PART
    predictor, digest = _model(given)
    with open_slide(path, given.mpp_slide) as opened:
        grid = make_grid(opened, given.mpp, given.tile)
        small = thumbnail(opened, grid)
        mask = tissue_mask(small, grid.cell**2 / 4)
        places = find_places(tissue_share(mask, grid), given.min_tissue)
        if not places:
            raise UnreadableSlide(
                path, f"no tile has {given.min_tissue:.0%} tissue; lower --min-tissue, or check --mpp and --tile"
            )
        settings = _settings(given, predictor, opened, digest)
        _check_settings(part, settings)
        part.mkdir(exist_ok=True)
        _write_json(part / DESCRIPTION, settings)
        save_png(part / "tissue.png", Image.fromarray(mask))
        save_thumbnail(part, small, grid)
        opened.handle.allow(len(places))
        with Progress(printable(path.name), len(places), quiet=quiet) as bar:
            scan(predictor, opened, grid, places, part / TILES, given.batch, bar.tick)
        files = _write_results(part, predictor.classes, grid, small, opened.mpp)
        facts = {"tiles": len(places), "origin": list(opened.origin), "files": files}
    _write_json(part / DESCRIPTION, settings | facts)
    os.replace(part, result)


def _write_results(
    folder: Path, classes: Sequence[str], grid: TileGrid, small: np.ndarray, mpp: tuple[float, float]
) -> dict[str, list[str]]:
    """Write shapes and maps from the CSV; returns the file names of the maps."""
    from patchgen.slides.geojson import write_geojson
    from patchgen.slides.heatmap import collect_maps, write_map
    from patchgen.slides.scan import read_tiles

    write_geojson(folder / "tiles.geojson", read_tiles(folder / TILES, classes), classes)
    maps = collect_maps(read_tiles(folder / TILES, classes), grid, classes)
    files = {}
    for i, (name, values) in enumerate(maps.items()):
        plain = re.sub(r"[^\w-]+", "_", name)[:48]  # the number distinguishes classes with the same plain name
        files[name] = write_map(folder / f"map_{i:02d}_{plain}", name, values, grid, small, mpp)
    return files


def _units(arguments: SlideArguments, slides: Sequence[Path]) -> list[Unit]:
    """The work of each slide; existing results must be of the same model and settings."""
    from patchgen.slides.slide import UnreadableSlide, open_slide
    from patchgen.sweep.unit import Needs, Unit

    a = arguments
    predictor, digest = _model(a)
    out, units = Path(arguments.out), []
    needs = Needs(arguments.threads, predictor.config.accelerator)
    runtime = a.runtime if a.alone else a.resolved_runtime(predictor)
    for path in slides:
        result, claim = out / path.stem, out / WORK / path.stem
        call = {
            "arguments": {**asdict(arguments), "runtime": runtime}, "slide": str(path),
            "result": str(result.absolute()), "quiet": not arguments.alone,
        }  # fmt: skip
        unit = Unit("patchgen.commands.slide:map_slide", call, claim, result, str(path), needs)
        _take_over(unit)
        for folder in (result, claim / PART):
            if (folder / DESCRIPTION).is_file():
                try:
                    with open_slide(path, arguments.mpp_slide) as slide:
                        _check_settings(folder, _settings(arguments, predictor, slide, digest))
                except UnreadableSlide:  # reported when it is processed
                    continue
        units.append(unit)
    return units


def _take_over(unit: Unit) -> None:
    """Continue an unfinished folder of an earlier version, which wrote directly to the slide's folder, as a claim."""
    file, part = unit.result / DESCRIPTION, unit.claim / PART
    if file.is_file() and not part.exists() and b'"files"' not in file.read_bytes():
        unit.begin()
        os.replace(unit.result, part)


def report_slides(failures: Mapping[str, str], total: int, strict: bool) -> int:
    """List on stderr why slides could not be used; returns the exit code, as `report_unreadable`."""
    from patchgen.slides.slide import UnreadableSlide

    failed = [UnreadableSlide(path, why.removeprefix(f"cannot use slide {path}: ").strip().splitlines()[-1])
              for path, why in failures.items()]  # fmt: skip
    return report_unreadable(failed, total, strict, "slides could not be read")


COMMAND = SlideArguments


def main(argv: list[str]) -> int:
    if argv and argv[0] in ACTIONS:
        from patchgen.commands.slide_tiles import main as main_tiles

        return main_tiles(argv[1:])
    arguments = parse(SlideArguments, "slide", argv)
    _check(arguments)
    from patchgen.slides.plan import find_slides

    slides = find_slides(arguments.slides)
    twice = [stem for stem, count in Counter(path.stem for path in slides).items() if count > 1]
    if twice:
        raise ValueError(f"two slides are called {twice[0]!r} and would share a folder; give them a command each")
    announce()
    from patchgen.common.machine import use_threads
    from patchgen.slides.cohort import write_cohort
    from patchgen.slides.slide import require_openslide

    require_openslide()
    if arguments.alone:
        use_threads(arguments.threads)  # before a runtime queries them
    units = _units(arguments, slides)
    failures = arguments.do_units(units, Path(arguments.out) / WORK, "slides", quiet=arguments.alone)
    done = [unit.result for unit in units if unit.label not in failures]
    for folder in done:
        print(folder, flush=True)
    if done:
        page = write_cohort(Path(arguments.out), done, failures)
        print(f"all slides on one page: {page}", file=sys.stderr)
    return report_slides(failures, len(slides), arguments.strict)

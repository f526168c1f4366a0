"""patchgen slide MODEL SLIDE... --out DIR: maps of whole slides as PNG, pyramid TIFF, CSV and GeoJSON for QuPath.

`patchgen slide tiles` (`slide_tiles.py`) makes training data from slides, `patchgen slide embed` feature vectors.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from patchgen.commands import Maybe, announce, check_folder, option_name, parse
from patchgen.commands.inputs import report_unreadable
from patchgen.commands.options import EngineOptions, RuntimeOptions
from patchgen.common.files import refuse_links, write_text
from patchgen.common.text import json_text, printable
from patchgen.common.untrusted import read_json, shortly

if TYPE_CHECKING:
    import numpy as np

    from patchgen.predict.predictor import Predictor
    from patchgen.slides.slide import Slide, TileGrid
    from patchgen.slides.tissue import Window

DESCRIPTION = "slide.json"
TILES = "tiles.csv"
ACTIONS = ("tiles", "embed")  # `patchgen slide tiles`, `patchgen slide embed`
WORK, PART = ".work", "part"  # the parent of unfinished slides, and the folder of partial results


@dataclass(frozen=True)
class SlideArguments(RuntimeOptions, EngineOptions):
    """Predict whole slides tile by tile: a folder per slide with tiles.csv, tiles.geojson and a map of each class.

    See `patchgen slide tiles --help` for cutting slides into labelled tiles for training.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN")]
    """Model folder, as `patchgen fit` prints it, or run folder, as `patchgen train` does."""
    slides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES...")]
    """Slide files: .svs, .ndpi, .mrxs, .scn, .tif and other formats that OpenSlide reads; or folders of them."""
    out: str
    """Folder for the results; created if missing. Resumable with the same command."""
    mpp: Maybe[float] = None
    """Resolution of the tiles in microns per pixel (0.5 is 20x); by default that of the training tiles."""
    tile: Maybe[int] = None
    """Side of a tile in pixels at that resolution; by default that of the training tiles."""
    tissue: str = "otsu"
    """How tissue is found: the built-in rule, or the name of a plug-in's function."""
    mask: Maybe[str] = None
    """Your own mask of tissue instead, image or GeoJSON; for several slides a folder of masks named like them."""
    mpp_slide: Maybe[float] = None
    """Microns per pixel of the slides themselves, if missing or wrong in the files."""
    patients: Maybe[str] = None
    """CSV file with the columns slide and patient (or group): adds a table per patient."""
    min_tissue: float = 0.5
    """Tiles with a smaller share of tissue are left out."""
    strict: bool = False
    """Exit with code 1 if any slide could not be used, not only if none could."""
    batch: int = 64
    """Tiles per forward pass."""


Scaled = TypeVar("Scaled", bound=SlideArguments)


def checked_slides(arguments: SlideArguments) -> list[Path]:
    """The slide files, which must have different names, after all checks that need no model."""
    from patchgen.slides.plan import find_slides
    from patchgen.slides.slide import require_openslide
    from patchgen.slides.tissue import check_rule

    if not arguments.slides:
        raise ValueError("no slide given; name slide files after the model")
    arguments.check_engine()
    if not 0 <= arguments.min_tissue <= 1:
        raise ValueError(f"--min-tissue is a share from 0 to 1, not {arguments.min_tissue}")
    check_positive(arguments, "mpp", "mpp_slide", "tile", "batch")
    check_folder(arguments.out)
    slides = find_slides(arguments.slides)
    check_rule(arguments.tissue, arguments.mask, slides)
    twice = [stem for stem, count in Counter(path.stem for path in slides).items() if count > 1]
    if twice:
        raise ValueError(f"two slides are called {twice[0]!r} and would share a folder; give them a command each")
    require_openslide()
    return slides


def check_positive(arguments: Any, *names: str) -> None:
    """ValueError for the first of these options that is given and not a finite number above 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option_name(name)} must be above 0, not {value}")


def with_scale(arguments: Scaled, predictor: Predictor) -> Scaled:
    """The arguments with --mpp and --tile of the training tiles, where they are not given.

    Raises:
        ValueError: the model does not know them.
    """
    from patchgen.data.table import TileScale

    known = predictor.tiles
    if known is None and (arguments.mpp is None or arguments.tile is None):
        raise ValueError(
            f"{arguments.model} does not say at what scale its training images were cut: give --mpp (microns per "
            "pixel, such as 0.5) and --tile (pixels, such as 224), as those images have them"
        )
    if known is None:
        return arguments
    scale = TileScale(arguments.mpp or known.mpp, arguments.tile or known.side)
    if scale != known:
        trained = f"but the model was trained on tiles of {known}: its predictions may be confident and wrong"
        print(f"WARNING: tiles of {scale}, {trained}", file=sys.stderr)
    return replace(arguments, mpp=scale.mpp, tile=scale.side)


def tile_settings(arguments: SlideArguments, predictor: Predictor, slide: Slide, digest: str) -> dict[str, Any]:
    """The settings that the tiles and their predictions depend on."""
    from patchgen.slides.tissue import tissue_facts

    return {
        "slide": slide.path.name,
        "bytes": slide.path.stat().st_size,
        "slide_mpp": list(slide.mpp),
        "mpp": arguments.mpp,
        "tile": arguments.tile,
        "min_tissue": arguments.min_tissue,
        **tissue_facts(slide.path, arguments.tissue, arguments.mask),
        "image_size": predictor.config.image_size,
        "classes": list(predictor.classes),
        "model": digest,
    }


def check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the description in `file` has other settings."""
    if not file.is_file():
        return
    refuse_links(file.parent)
    try:
        was = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it with its results, or choose another --out") from error
    changed = [name for name, value in settings.items() if was.get(name) != value]
    if changed:
        change = f"{changed[0]} {shortly(was.get(changed[0]))}, now {shortly(settings[changed[0]])}"
        place = file.parent if file.name == DESCRIPTION else file.with_suffix("")
        raise ValueError(f"{place} was started with other settings ({change}); remove it, or choose another --out")


def load_model(arguments: SlideArguments) -> tuple[Predictor, str]:
    """The predictor and its digest, loaded once for all slides of this process."""
    from patchgen.predict.predictor import identity

    predictor = arguments.load_once(arguments.model)
    return predictor, " ".join([identity(arguments.model, arguments.checkpoint)[:16], predictor.variant]).strip()


def find_tiles(slide: Slide, options: SlideArguments) -> tuple[TileGrid, np.ndarray, np.ndarray, list[Window]]:
    """The grid of a slide, its thumbnail and mask of tissue, and the tiles with enough tissue.

    Raises:
        UnreadableSlide: there are none.
    """
    from patchgen.slides import tissue

    assert options.mpp is not None and options.tile is not None  # by `with_scale`
    grid, small, mask, windows = tissue.find_tiles(
        slide, mpp=options.mpp, tile=options.tile, tissue=options.tissue, mask=options.mask,
        min_tissue=options.min_tissue,
    )  # fmt: skip
    slide.allow(len(windows))
    return grid, small, mask, windows


def map_slide(folder: Path, arguments: dict[str, Any], slide: str, result: str, quiet: bool) -> None:
    """Process one slide; `folder` has the partial results, and `result` appears when it is complete.

    Raises:
        UnreadableSlide: the slide cannot be used, or shows no tissue.
    """
    from PIL import Image

    from patchgen.common.progress import Progress
    from patchgen.slides.cohort import save_thumbnail
    from patchgen.slides.heatmap import save_png
    from patchgen.slides.scan import scan
    from patchgen.slides.slide import open_slide

    options, path, part = SlideArguments(**arguments), Path(slide), folder / PART
    predictor, digest = load_model(options)
    with open_slide(path, options.mpp_slide) as opened:
        grid, small, mask, places = find_tiles(opened, options)
        settings = tile_settings(options, predictor, opened, digest)
        check_settings(part / DESCRIPTION, settings)
        part.mkdir(exist_ok=True)
        write_text(part / DESCRIPTION, json_text(settings) + "\n")
        save_png(part / "tissue.png", Image.fromarray(mask))
        save_thumbnail(part, small, grid)
        with Progress(printable(path.name), len(places), quiet=quiet) as bar:
            scan(predictor, opened, grid, places, part / TILES, options.batch, bar.tick)
        files = _write_results(part, predictor.classes, grid, small, opened.mpp)
        facts = {"tiles": len(places), "origin": list(opened.origin), "files": files}
    write_text(part / DESCRIPTION, json_text(settings | facts) + "\n")
    os.replace(part, result)


def _write_results(
    folder: Path, classes: Sequence[str], grid: TileGrid, small: np.ndarray, mpp: tuple[float, float]
) -> dict[str, list[str]]:
    """Write shapes and maps from the CSV; returns the file names of the maps."""
    from patchgen.slides.heatmap import collect_maps, write_geojson, write_map
    from patchgen.slides.scan import read_tiles

    tiles, files = read_tiles(folder / TILES), {}
    write_geojson(folder / "tiles.geojson", tiles, classes)
    for i, (name, values) in enumerate(collect_maps(tiles, grid, classes).items()):
        plain = re.sub(r"[^\w-]+", "_", name)[:48]  # the number distinguishes classes with the same plain name
        files[name] = write_map(folder / f"map_{i:02d}_{plain}", name, values, grid, small, mpp)
    return files


def process_slides(
    arguments: SlideArguments,
    slides: Sequence[Path],
    predictor: Predictor,
    function: str,
    description_of: Callable[[Path], Path],
    settings_of: Callable[[Slide], dict[str, Any]],
    ending: str = "",
) -> tuple[list[Path], dict[str, str]]:
    """Call a function for each slide, here or on the engine; returns finished results and failures, in their order.

    Args:
        description_of: The file that describes a result: an existing one must have the settings of this command.
        ending: Of a result's name after that of the slide; without it results are folders.
    """
    from patchgen.slides.slide import UnreadableSlide, open_slide
    from patchgen.sweep.jobs import Needs, Unit

    out, units = Path(arguments.out), []
    needs = Needs(arguments.threads, predictor.config.accelerator)
    runtime = arguments.runtime if arguments.alone else arguments.resolved_runtime(predictor)
    for path in slides:
        result, claim = out / f"{path.stem}{ending}", out / WORK / path.stem
        for file in (description_of(result), claim / PART / DESCRIPTION):
            if file.is_file() and (file.parent.name == PART or result.exists()):
                with suppress(UnreadableSlide), open_slide(path, arguments.mpp_slide) as slide:  # reported later
                    check_settings(file, settings_of(slide))
        call = {
            "arguments": {**asdict(arguments), "runtime": runtime}, "slide": str(path),
            "result": str(result.absolute()), "quiet": not arguments.alone,
        }  # fmt: skip
        units.append(Unit(function, call, claim, result, str(path), needs))
    failures = arguments.do_units(units, out / WORK, "slides", quiet=arguments.alone)
    finished = [unit.result for unit in units if unit.label not in failures]
    for result in finished:
        print(result, flush=True)
    return finished, failures


def report_slides(failures: Mapping[str, str], total: int, strict: bool) -> int:
    """List on stderr why slides could not be used; returns the exit code, as `report_unreadable`."""
    from patchgen.slides.slide import UnreadableSlide

    unreadable = [UnreadableSlide(path, reason.removeprefix(f"cannot use slide {path}: ").strip().splitlines()[-1])
                  for path, reason in failures.items()]  # fmt: skip
    return report_unreadable(unreadable, total, strict, "slides could not be read")


COMMAND = SlideArguments


def main(argv: list[str]) -> int:
    if argv and argv[0] in ACTIONS:
        return int(import_module(f"patchgen.commands.slide_{argv[0]}").main(argv[1:]))
    arguments = parse(SlideArguments, "slide", argv)
    slides = checked_slides(arguments)
    from patchgen.slides.plan import read_patients

    patients = read_patients(arguments.patients) if arguments.patients else {}
    announce()
    from patchgen.common.machine import use_threads
    from patchgen.slides.cohort import write_cohort

    if arguments.alone:
        use_threads(arguments.threads)  # before a runtime queries them
    predictor, digest = load_model(arguments)
    arguments = with_scale(arguments, predictor)
    finished, failures = process_slides(
        arguments, slides, predictor, "patchgen.commands.slide:map_slide", lambda result: result / DESCRIPTION,
        lambda slide: tile_settings(arguments, predictor, slide, digest),
    )  # fmt: skip
    if finished:
        page = write_cohort(Path(arguments.out), finished, failures, patients)
        print(f"all slides on one page: {page}", file=sys.stderr)
    return report_slides(failures, len(slides), arguments.strict)

"""patchgen slide MODEL SLIDE... --out DIR: maps of whole slides as PNG, pyramid TIFF, CSV and GeoJSON for QuPath.

`patchgen slide embed MODEL SLIDE... --out DIR` writes feature vectors of the tiles of slides, one file per slide;
`patchgen slide tiles` (`slide_tiles.py`) makes training data from slides.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchgen.commands import Maybe
from patchgen.commands.options import RuntimeOptions, report_slides
from patchgen.commands.slide_tiles import SlideOptions, cut_tiles
from patchgen.common.files import expanded, write_text
from patchgen.common.progress import Progress
from patchgen.common.text import json_text, printable

if TYPE_CHECKING:
    import numpy as np

    from patchgen.predict.predictor import Predictor
    from patchgen.slides.slide import Slide, TileGrid
    from patchgen.slides.tissue import Window

WORK, PART = ".work", "part"  # the parent of unfinished slides, and the folder of partial results


@dataclass(frozen=True, kw_only=True)
class SlideArguments(SlideOptions, RuntimeOptions):
    """Predict whole slides tile by tile: a folder per slide with tiles.csv, tiles.geojson and a map of each class.

    See `patchgen slide tiles --help` for cutting slides into labelled tiles for training.
    """

    mpp: Maybe[float] = None
    """Resolution of the tiles in microns per pixel (0.5 is 20x); by default that of the training tiles."""
    tile: Maybe[int] = None
    """Side of a tile in pixels at that resolution; by default that of the training tiles."""
    patients: Maybe[str] = None
    """CSV file with the columns slide and patient (or group): adds a table per patient."""
    batch: int = 64
    """Tiles per forward pass."""

    def find_slides(self) -> list[Path]:
        """The slide files, which must have different names."""
        slides = super().find_slides()
        twice = [stem for stem, count in Counter(path.stem for path in slides).items() if count > 1]
        if twice:
            raise ValueError(f"two slides are called {twice[0]!r} and would share a folder; give them a command each")
        return slides

    def load_model(self) -> "tuple[Predictor, str]":
        """The predictor and its digest, loaded once for all slides of this process."""
        from patchgen.predict.predictor import identity

        predictor = self.load_once()
        return predictor, " ".join([identity(self.model, self.checkpoint)[:16], predictor.variant]).strip()

    def find_tiles(self, slide: "Slide") -> "tuple[TileGrid, np.ndarray, np.ndarray, list[Window]]":
        """The grid of a slide, its thumbnail and mask of tissue, and the tiles with enough tissue."""
        from patchgen.slides.tissue import find_tiles

        assert self.mpp is not None and self.tile is not None  # by `_with_scale`
        found = find_tiles(
            slide, mpp=self.mpp, tile=self.tile, tissue=self.tissue, mask=self.mask, min_tissue=self.min_tissue
        )
        slide.allow(len(found[-1]))
        return found

    def settings(self, predictor: "Predictor", slide: "Slide", digest: str) -> dict[str, Any]:
        """The settings that the tiles and their predictions depend on."""
        from patchgen.slides.tissue import tissue_facts

        return {
            "slide": slide.path.name, "bytes": slide.path.stat().st_size, "slide_mpp": list(slide.mpp),
            "mpp": self.mpp, "tile": self.tile, "min_tissue": self.min_tissue,
            **tissue_facts(slide.path, self.tissue, self.mask),
            "image_size": predictor.config.image_size, "classes": list(predictor.classes), "model": digest,
        }  # fmt: skip


def _with_scale(arguments: SlideArguments, predictor: "Predictor") -> SlideArguments:
    """The arguments with --mpp and --tile of the training tiles, where they are not given."""
    from patchgen.data.table import TileScale

    known = predictor.tiles
    if known is None:
        if arguments.mpp is None or arguments.tile is None:
            raise ValueError(
                f"{arguments.model} does not say at what scale its training images were cut: give --mpp (microns per "
                "pixel, such as 0.5) and --tile (pixels, such as 224), as those images have them"
            )
        return arguments
    scale = TileScale(arguments.mpp or known.mpp, arguments.tile or known.side)
    if scale != known:
        trained = f"but the model was trained on tiles of {known}: its predictions may be confident and wrong"
        print(f"WARNING: tiles of {scale}, {trained}", file=sys.stderr)
    return replace(arguments, mpp=scale.mpp, tile=scale.side)


def _process(
    arguments: SlideArguments, slides: Sequence[Path], work: Callable[..., None], ending: str = ""
) -> tuple[list[Path], dict[str, str]]:
    """Call a function for each slide, here or on the engine; the results (files if `ending`) and failures, in order."""
    from patchgen.slides.cut import DESCRIPTION, check_settings
    from patchgen.slides.slide import UnreadableSlide, open_slide
    from patchgen.sweep.jobs import Needs, Unit

    arguments.use_threads()
    predictor, digest = arguments.load_model()
    arguments = _with_scale(arguments, predictor)
    out, units = expanded(arguments.out), []
    needs = Needs(arguments.threads, predictor.config.accelerator)
    runtime = arguments.runtime if arguments.alone else arguments.resolved_runtime(predictor)
    for path in slides:
        result = out / f"{path.stem}{ending}"
        if result.exists():
            with suppress(UnreadableSlide), open_slide(path, arguments.mpp_slide) as slide:  # reported later
                file = result.with_suffix(".json") if ending else result / DESCRIPTION
                check_settings(file, arguments.settings(predictor, slide, digest))
        call = {
            "arguments": {**asdict(arguments), "runtime": runtime}, "slide": str(path),
            "result": str(result.absolute()), "quiet": not arguments.alone,
        }  # fmt: skip
        name = f"{work.__module__}:{work.__name__}"
        units.append(Unit(name, call, out / WORK / path.stem, result, str(path), needs))
    failures = arguments.do_units(units, out / WORK, "slides", quiet=arguments.alone)
    finished = [unit.result for unit in units if unit.label not in failures]
    for result in finished:
        print(result, flush=True)
    return finished, failures


# Maps


def map_slides(arguments: SlideArguments) -> int:
    from patchgen.slides.cut import read_patients

    slides = arguments.find_slides()
    patients = read_patients(arguments.patients) if arguments.patients else {}
    from patchgen.slides.cohort import write_cohort

    finished, failures = _process(arguments, slides, map_slide)
    if finished:
        page = write_cohort(expanded(arguments.out), finished, failures, patients)
        print(f"all slides on one page: {page}", file=sys.stderr)
    return report_slides(failures, len(slides), arguments.strict)


def map_slide(folder: Path, arguments: dict[str, Any], slide: str, result: str, quiet: bool) -> None:
    """Process one slide; `folder` has the partial results, and `result` appears when it is complete."""
    from PIL import Image

    from patchgen.slides.cohort import save_thumbnail
    from patchgen.slides.cut import DESCRIPTION, TILES, check_settings
    from patchgen.slides.heatmap import collect_maps, read_tiles, save_png, scan, write_geojson, write_map
    from patchgen.slides.slide import open_slide

    options, path, part = SlideArguments(**arguments), Path(slide), folder / PART
    predictor, digest = options.load_model()
    with open_slide(path, options.mpp_slide) as opened:
        grid, small, mask, places = options.find_tiles(opened)
        settings = options.settings(predictor, opened, digest)
        check_settings(part / DESCRIPTION, settings)
        part.mkdir(exist_ok=True)
        write_text(part / DESCRIPTION, json_text(settings) + "\n")
        save_png(part / "tissue.png", Image.fromarray(mask))
        save_thumbnail(part, small, grid)
        with Progress(printable(path.name), len(places), quiet=quiet) as bar:
            scan(predictor, opened, grid, places, part / TILES, options.batch, bar.tick)
        tiles, files = read_tiles(part / TILES), {}
        write_geojson(part / "tiles.geojson", tiles, predictor.classes)
        for i, (name, values) in enumerate(collect_maps(tiles, grid, predictor.classes).items()):
            plain = re.sub(r"[^\w-]+", "_", name)[:48]  # the number distinguishes classes with the same plain name
            files[name] = write_map(part / f"map_{i:02d}_{plain}", name, values, grid, small, opened.mpp)
        facts = {"tiles": len(places), "origin": list(opened.origin), "files": files}
    write_text(part / DESCRIPTION, json_text(settings | facts) + "\n")
    os.replace(part, result)


# Vectors


@dataclass(frozen=True, kw_only=True)
class SlideEmbedArguments(SlideArguments):
    """Write the feature vectors of all tiles with tissue, with their places: a file per slide, for other tools."""

    what: tuple[Literal["features", "cls", "mean"], ...] = ("features",)
    """`features` the head reads (z+ with PatchGen); class token and mean patch token of the tuned backbone."""
    format: Literal["npz", "parquet"] = "npz"
    """The kind of file; Parquet needs the extra `parquet`."""
    image_size: int = 224
    """Of a bare encoder (a name, hub id or folder): tiles are resized to this square."""

    def load_model(self) -> "tuple[Predictor, str]":
        """The trained model or bare encoder, and its digest."""
        from patchgen.runs.folder import is_model_folder

        path = expanded(self.model)
        if is_model_folder(path) or (path / "config.yaml").is_file():
            return super().load_model()
        predictor = _load_encoder(self.model, self.image_size, self.accelerator, self.precision)
        return predictor, predictor.model.backbone.digest()[:16]

    def settings(self, predictor: "Predictor", slide: "Slide", digest: str) -> dict[str, Any]:
        return super().settings(predictor, slide, digest) | {"what": list(self.what)}


@lru_cache(1)
def _load_encoder(source: str, image_size: int, accelerator: Any, precision: Any) -> "Predictor":
    from patchgen.predict.embed import load_embedder

    return load_embedder(source, image_size=image_size, accelerator=accelerator, precision=precision)


def embed_slides(arguments: SlideEmbedArguments) -> int:
    slides, out = arguments.find_slides(), expanded(arguments.out)
    if arguments.runtime not in ("auto", "torch") or not arguments.what:
        raise ValueError("`slide embed` uses torch; leave --runtime out, and name a vector with --what")
    from patchgen.predict.embed import require_parquet

    require_parquet(out / f"x.{arguments.format}")
    out.mkdir(parents=True, exist_ok=True)
    _, failures = _process(arguments, slides, embed_slide, f".{arguments.format}")
    return report_slides(failures, len(slides), arguments.strict)


def embed_slide(folder: Path, arguments: dict[str, Any], slide: str, result: str, quiet: bool) -> None:
    """Embed one slide; `result` appears when it is complete."""
    import numpy as np

    from patchgen.predict.embed import vectors_of, write_columns
    from patchgen.predict.predictor import NOT_FINITE
    from patchgen.slides.heatmap import read_batches
    from patchgen.slides.slide import UnreadableSlide, open_slide

    options = SlideEmbedArguments(**{**arguments, "what": tuple(arguments["what"])})
    predictor, digest = options.load_model()
    parts: dict[str, list[np.ndarray]] = {name: [] for name in options.what}
    with open_slide(slide, options.mpp_slide) as opened:
        grid, _, _, places = options.find_tiles(opened)
        with Progress(printable(Path(slide).name), len(places), quiet=quiet) as bar:
            for _, pixels in read_batches(opened, grid, places, predictor, options.batch, bar.tick):
                for name, vectors in vectors_of(predictor, pixels, options.what).items():
                    if not np.isfinite(vectors).all():
                        raise UnreadableSlide(slide, NOT_FINITE)
                    parts[name].append(vectors)
        settings = options.settings(predictor, opened, digest)
    boxes = np.array([grid.box(place.column, place.row) for place in places])
    columns = {"column": [p.column for p in places], "row": [p.row for p in places], "x": boxes[:, 0], "y": boxes[:, 1],
               "width": boxes[:, 2] - boxes[:, 0], "height": boxes[:, 3] - boxes[:, 1]}  # fmt: skip
    table = {name: np.asarray(values, dtype=np.int64) for name, values in columns.items()}
    table["tissue"] = np.array([place.tissue for place in places], dtype=np.float32)
    write_text(Path(result).with_suffix(".json"), json_text(settings) + "\n")
    write_columns(result, table | {name: np.concatenate(vectors) for name, vectors in parts.items()})


COMMAND: Mapping[str, Callable[..., int]] = {"map": map_slides, "tiles": cut_tiles, "embed": embed_slides}
DEFAULT = "map"

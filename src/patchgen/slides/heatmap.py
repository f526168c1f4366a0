"""The predictions of a slide's tiles: into a resumable CSV file, as maps of the slide, pyramid TIFF and GeoJSON.

A resumed pass uses the same batches as an uninterrupted one, and so produces the same file. Maps are not smoothed,
which would suggest a finer resolution. Pillow writes TIFFs in strips only, which slide viewers cannot page through; its
directories are used here around tiles at every halving.
"""

import csv
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from PIL import Image
from PIL.TiffImagePlugin import IFDRational, ImageFileDirectory_v2

from patchgen.common.files import not_through_links, replacing
from patchgen.common.reading import batches
from patchgen.common.text import json_text
from patchgen.draw.overlay import COLOURS, NOTICE, as_picture, panels
from patchgen.slides.slide import Slide, TileGrid
from patchgen.slides.tissue import Window

if TYPE_CHECKING:
    from patchgen.predict.predictor import Prediction, Predictor

COLUMNS = ("column", "row", "x", "y", "width", "height", "tissue", "label", "confidence", "mask", "unlike_training")
Tick = Callable[[int], None] | None
MASK = "mask mean"
TILE_NOTICE = "one prediction per tile, not an annotation"
TILE = 256
MICRONS = 10_000  # per centimetre
# Okabe and Ito's colour-blind safe colours (2008), without black; further classes repeat them
CLASS_COLOURS = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
)  # fmt: skip


def scan(
    predictor: "Predictor", slide: Slide, grid: TileGrid, windows: Sequence[Window], file: Path, batch: int = 64,
    tick: Tick = None,
) -> None:  # fmt: skip
    """Predict the tiles missing from `file`, and append them batch by batch."""
    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow([*COLUMNS, *(f"p_{name}" for name in predictor.classes)])
    done = _resume(file, header.getvalue().encode(), windows, batch)
    if tick and done:
        tick(done)
    with open(file, "a", newline="", encoding="utf-8", opener=not_through_links) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        for part, pixels in read_batches(slide, grid, windows[done:], predictor, batch, tick):
            writer.writerows(_row(*pair, grid) for pair in zip(part, predictor.score(pixels), strict=True))
            stream.flush()


def read_batches(
    slide: Slide, grid: TileGrid, windows: Sequence[Window], predictor: "Predictor", batch: int, tick: Tick = None
) -> Iterator[tuple[Sequence[Window], list[np.ndarray]]]:
    """Batches of tiles as the model reads them, (S, S, 3) uint8; the next batch is read while one is used."""
    size = predictor.config.image_size

    def read(window: Window) -> np.ndarray:
        return slide.read(window.corner, grid.step, (size, size), predictor.interpolation)

    yield from batches(windows, read, batch, tick, each=True)


def read_tiles(file: Path) -> pd.DataFrame:
    """The tiles of a CSV; `mask` and `unlike_training` are NaN where the model has none."""
    optional = {name: [""] for name in ("mask", "unlike_training")}
    return pd.read_csv(file, keep_default_na=False, na_values=optional, dtype={"label": str})


def _row(window: Window, prediction: "Prediction", grid: TileGrid) -> list[Any]:
    left, top, right, bottom = grid.box(window.column, window.row)
    mask = "" if prediction.mask is None else f"{prediction.mask.mean():.6f}"
    unlike = "" if prediction.unlike_training is None else str(prediction.unlike_training).lower()
    return [
        window.column, window.row, left, top, right - left, bottom - top, f"{window.tissue:.4f}", prediction.label,
        f"{prediction.confidence:.6f}", mask, unlike, *(f"{p:.6f}" for p in prediction.probabilities),
    ]  # fmt: skip


def _resume(file: Path, header: bytes, windows: Sequence[Window], batch: int) -> int:
    """Truncate the file to its last complete batch and return its number of tiles; a new file gets its header."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if not lines or not lines[0].endswith(b"\n"):
        lines = [header]
    whole = [line for line in lines[1:] if line.endswith(b"\n")]  # a kill may leave half a line
    predicted = [tuple(line.decode().split(",", 2)[:2]) for line in whole]
    expected = [(str(window.column), str(window.row)) for window in windows[: len(whole)]]
    if lines[0] != header or predicted != expected:
        raise ValueError(f"{file} belongs to other tiles or another model; remove it, or choose another --out")
    done = len(whole) if len(whole) == len(windows) else len(whole) // batch * batch
    with replacing(file) as temporary:
        temporary.write_bytes(b"".join(lines[: 1 + done]))
    return done


# Maps


def collect_maps(tiles: pd.DataFrame, grid: TileGrid, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """(rows, columns) float32 for each class and, if the model has a mask, its mean; NaN without a tile."""
    columns = {f"p {name}": f"p_{name}" for name in classes} | ({MASK: "mask"} if tiles["mask"].notna().any() else {})
    maps = {name: np.full((grid.rows, grid.columns), np.nan, np.float32) for name in columns}
    for name, column in columns.items():
        maps[name][tiles["row"].to_numpy(), tiles["column"].to_numpy()] = tiles[column]
    return maps


def enlarge(values: np.ndarray, grid: TileGrid) -> np.ndarray:
    """One value per tile -> `grid.cell` pixels per tile, cropped to the slide: (height, width)."""
    width, height = grid.map_size
    return values.repeat(grid.cell, axis=0).repeat(grid.cell, axis=1)[:height, :width]


def colour(values: np.ndarray) -> np.ndarray:
    """Values in [0, 1] -> (..., 4) uint8; NaN is white and transparent."""
    from matplotlib import colormaps

    colours = colormaps[COLOURS].with_extremes(bad=(1, 1, 1, 0))
    return np.asarray(colours(np.ma.masked_invalid(values), bytes=True))


def write_map(
    stem: Path, name: str, values: np.ndarray, grid: TileGrid, small: np.ndarray, mpp: tuple[float, float]
) -> list[str]:
    """Write `stem`.png, `stem`.tif (pyramid) and `stem`_overlay.png of (rows, columns) in [0, 1] or NaN; names."""
    large = enlarge(values, grid)
    pixels, notice = colour(large), NOTICE if name == MASK else TILE_NOTICE
    files = [stem.with_name(stem.name + end) for end in (".png", ".tif", "_overlay.png")]
    x, y = (m * whole / n for m, whole, n in zip(mpp, grid.size, grid.map_size, strict=True))
    save_png(files[0], Image.fromarray(pixels))
    write_pyramid(files[1], np.ascontiguousarray(pixels[..., :3]), (x, y), f"{name}: {notice}")
    save_png(files[2], overlay(small, large, name, notice))
    return [file.name for file in files]


def save_png(path: Path, picture: Image.Image) -> None:
    with replacing(path) as temporary:
        picture.save(temporary, "PNG")


def overlay(small: np.ndarray, values: np.ndarray, name: str, notice: str) -> Image.Image:
    """[thumbnail | map over it] with a colour bar and a notice."""
    height, width = values.shape
    figure, left, right = panels(small[:height, :width], values)
    figure.suptitle(name, fontsize=14, weight="bold", parse_math=False)
    tiles = values[~np.isnan(values)]
    left.set_title("slide", fontsize=9, color="0.35")
    right.set_title(f"mean over the tissue {tiles.mean():.2f}" if tiles.size else "no tile", fontsize=9, color="0.35")
    right.set_xlabel(notice, fontsize=9, color="0.35", style="italic")
    return as_picture(figure)


def write_geojson(path: str | Path, tiles: pd.DataFrame, classes: Sequence[str]) -> None:
    """A feature per tile: its square in pixels of level 0, as QuPath reads it, class, colour, and all numbers."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.write('{"type": "FeatureCollection", "features": [')
        for i, row in enumerate(tiles.itertuples(index=False, name=None)):
            tile = dict(zip(tiles.columns, row, strict=True))
            stream.write(("," if i else "") + "\n" + json_text(_feature(tile, classes), None))
        stream.write("\n]}\n")


def _feature(tile: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """One tile; its ring runs counter-clockwise in GeoJSON's sense (y up) and ends where it began."""
    left, top = tile["x"], tile["y"]
    right, bottom = left + tile["width"], top + tile["height"]
    measurements = {f"p {name}": tile[f"p_{name}"] for name in classes} | {"tissue": tile["tissue"]}
    optional = {"mask mean": tile["mask"], "unlike training": tile["unlike_training"]}
    measurements |= {name: float(value) for name, value in optional.items() if not pd.isna(value)}
    colour = CLASS_COLOURS[list(classes).index(tile["label"]) % len(CLASS_COLOURS)]
    classification = {"name": tile["label"], "color": list(colour)}
    ring = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"objectType": "tile", "classification": classification, "measurements": measurements},
    }


def write_pyramid(
    path: str | Path, image: np.ndarray, mpp: tuple[float, float] | None = None, description: str = ""
) -> None:
    """Write `image` (H,W,3) uint8 and its halvings down to one tile, with microns per pixel in x and y if known."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<2sHL", b"II", 42, 0))
        link = 4  # position of the offset of the next directory
        for level, pixels in enumerate(_halvings(image)):
            offsets, sizes = [], []
            for tile in _tiles(pixels):
                offsets.append(file.tell())
                sizes.append(file.write(tile))
            height, width = pixels.shape[:2]
            tags = ImageFileDirectory_v2()
            tags[254] = int(level > 0)  # a reduced copy
            tags[256], tags[257] = width, height
            tags[258] = 8, 8, 8  # bits
            tags[259], tags[262], tags[277], tags[284] = 8, 2, 3, 1  # deflate, RGB in three interleaved channels
            tags[322] = tags[323] = TILE
            tags[324], tags[325] = tuple(offsets), tuple(sizes)
            if description and not level:
                tags[270] = description.encode("ascii", "replace").decode()
            if mpp:  # pixels per centimetre
                for tag, microns, whole, side in zip((282, 283), mpp, image.shape[1::-1], (width, height), strict=True):
                    tags[tag] = IFDRational(round(1000 * MICRONS * side / (microns * whole)), 1000)
                tags[296] = 3
            file.write(b"\0" * (file.tell() % 2))  # offsets must be even
            start = file.tell()
            file.write(tags.tobytes(start))
            file.seek(link)
            file.write(struct.pack("<L", start))
            file.seek(0, 2)
            link = start + 2 + 12 * len(tags)


def _halvings(image: np.ndarray) -> Iterator[np.ndarray]:
    yield image
    while max(image.shape[:2]) > TILE:
        size = -(-image.shape[1] // 2), -(-image.shape[0] // 2)
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX))
        yield image


def _tiles(pixels: np.ndarray) -> Iterator[bytes]:
    """Compressed tiles, row by row; pixels beyond the edge repeat it, which compresses well."""
    height, width = pixels.shape[:2]
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            tile = pixels[top : top + TILE, left : left + TILE]
            beyond = (0, TILE - tile.shape[0]), (0, TILE - tile.shape[1]), (0, 0)
            yield zlib.compress(np.pad(tile, beyond, mode="edge").tobytes(), 6)

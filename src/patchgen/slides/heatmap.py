"""Tile predictions as maps of the slide: one value per tile, colours fixed to 0..1, empty without tissue.

    maps = collect_maps(read_tiles(file, classes), grid, classes)     # {"p tumour": (rows, columns), ...}
    write_map(out / "tumour", "p tumour", maps["p tumour"], grid, small, slide.mpp)

A map is drawn in squares, without smoothing, which would suggest a finer resolution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from patchgen.common.files import replacing
from patchgen.draw.overlay import COLOURS, NOTICE, OPACITY
from patchgen.slides.pyramid import write_pyramid
from patchgen.slides.scan import TilePrediction
from patchgen.slides.tiles import TileGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASK = "mask mean"
TILE_NOTICE = "one prediction per tile, not an annotation"


def collect_maps(tiles: Iterable[TilePrediction], grid: TileGrid, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """(rows, columns) float32 for each class and, if the model has a mask, its mean; NaN without a tile."""
    maps = {
        name: np.full((grid.rows, grid.columns), np.nan, np.float32) for name in (*map("p {}".format, classes), MASK)
    }
    for tile in tiles:
        for name, value in zip(classes, tile.probabilities, strict=True):
            maps[f"p {name}"][tile.row, tile.column] = value
        maps[MASK][tile.row, tile.column] = np.nan if tile.mask is None else tile.mask
    if np.isnan(maps[MASK]).all():
        del maps[MASK]
    return maps


def enlarge(values: np.ndarray, grid: TileGrid) -> np.ndarray:
    """One value per tile -> `grid.cell` pixels per tile, cropped to the slide: (height, width)."""
    width, height = grid.map_size
    return values.repeat(grid.cell, axis=0).repeat(grid.cell, axis=1)[:height, :width]


def colour(values: np.ndarray) -> np.ndarray:
    """Values in [0, 1] -> (..., 4) uint8; NaN is white and transparent."""
    from matplotlib import colormaps

    there = ~np.isnan(values)
    painted = colormaps[COLOURS](np.where(there, values, 0), bytes=True)
    painted[~there] = (255, 255, 255, 0)
    return painted


def write_map(
    stem: Path, name: str, values: np.ndarray, grid: TileGrid, small: np.ndarray, mpp: tuple[float, float]
) -> list[str]:
    """Write `stem`.png (transparent without tissue), `stem`.tif (pyramid) and `stem`_overlay.png; their names.

    Args:
        values: (rows, columns) in [0, 1], NaN where there is no tile.
        small: The slide's thumbnail, at `grid.cell` pixels per tile.
        mpp: Microns per pixel of the slide's level 0.
    """
    pixels = colour(enlarge(values, grid))
    files = [stem.with_name(stem.name + end) for end in (".png", ".tif", "_overlay.png")]
    save_png(files[0], Image.fromarray(pixels))
    scale = [m * whole / n for m, whole, n in zip(mpp, grid.size, grid.map_size, strict=True)]
    notice = NOTICE if name == MASK else TILE_NOTICE
    write_pyramid(files[1], np.ascontiguousarray(pixels[..., :3]), (scale[0], scale[1]), f"{name}: {notice}")
    save_png(files[2], overlay(small, enlarge(values, grid), name, notice))
    return [file.name for file in files]


def save_png(path: Path, picture: Image.Image) -> None:
    with replacing(path) as temporary:
        picture.save(temporary, "PNG")


def overlay(small: np.ndarray, values: np.ndarray, name: str, notice: str) -> Image.Image:
    """[thumbnail | map over it] with a colour bar and a notice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    height, width = values.shape
    canvas = FigureCanvasAgg(_draw(small[:height, :width], values, name, notice))
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _draw(small: np.ndarray, values: np.ndarray, name: str, notice: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shape = min(max(values.shape[0] / values.shape[1], 0.4), 2.5)
    figure = Figure(figsize=(11, 5 * shape + 0.9), dpi=120, facecolor="white", layout=ConstrainedLayoutEngine())
    left, right = figure.subplots(1, 2)
    left.imshow(small)
    right.imshow(np.asarray(Image.fromarray(small).convert("L")), cmap="gray", vmin=0, vmax=255)
    colours = right.imshow(values, cmap=COLOURS, vmin=0, vmax=1, alpha=OPACITY, interpolation="nearest")
    bar = figure.colorbar(colours, ax=right, fraction=0.046, pad=0.02)
    bar.ax.set_facecolor("0.55")  # gray behind the semi-transparent colours, as on the slide
    figure.suptitle(name, fontsize=14, weight="bold", parse_math=False)
    tiles = values[~np.isnan(values)]
    left.set_title("slide", fontsize=9, color="0.35")
    right.set_title(f"mean over the tissue {tiles.mean():.2f}" if tiles.size else "no tile", fontsize=9, color="0.35")
    right.set_xlabel(notice, fontsize=9, color="0.35", style="italic")
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return figure

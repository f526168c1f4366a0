"""Which part of a slide is tissue, by a function on its thumbnail or by the user's own mask, and its tiles.

The built-in function takes saturated colour on pale glass, by Otsu's threshold (1979). That always finds a split, so a
floor prevents the noise of empty glass from counting as tissue. A plug-in adds its own function to `TISSUE`.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchgen.common.files import expanded
from patchgen.common.plugins import load_all
from patchgen.common.text import did_you_mean
from patchgen.data.image_files import open_image
from patchgen.slides.annotations import drawn_mask
from patchgen.slides.slide import Slide, TileGrid, UnreadableSlide, check_count, make_grid, thumbnail

SHAPES = (".geojson", ".json")
PICTURES = (".png", ".tif", ".tiff", ".bmp")
ASPECT = 0.02  # by how much the aspect of a mask may differ from its slide's
FLOOR = 15  # of 255: glass, even yellowed, is below this saturation
DARK = 40  # of 255: below this brightness (pen, edges, scanner's black) saturation is rounding noise


def check_rule(method: str, mask: str | None, slides: Sequence[Path]) -> None:
    """Check --tissue and --mask before any work."""
    load_all()
    if method not in TISSUE:
        raise ValueError(f"--tissue: unknown {method!r}{did_you_mean(method, TISSUE)} (known: {', '.join(TISSUE)})")
    if mask and not expanded(mask).exists():
        raise ValueError(f"--mask: there is no file or folder {mask}")
    if mask and expanded(mask).is_file() and len(slides) > 1:
        raise ValueError(f"--mask {mask} is one file for {len(slides)} slides; give a folder of masks named like them")


def tissue_facts(slide: Path, method: str, mask: str | None) -> dict[str, str]:
    """What results depend on; empty for the usual rule."""
    if file := _mask_of(slide, mask):
        return {"mask": hashlib.sha256(file.read_bytes()).hexdigest()[:16]}
    return {} if method == "otsu" else {"tissue": method}


def _mask_of(slide: Path, mask: str | None) -> Path | None:
    """The file with the mask of a slide; in a folder of masks, that with the slide's name."""
    if mask is None or expanded(mask).is_file():
        return expanded(mask) if mask else None
    names = [f"{name}{ending}" for ending in (*PICTURES, *SHAPES) for name in (slide.stem, slide.name)]
    if files := [expanded(mask) / name for name in names if (expanded(mask) / name).is_file()]:
        return files[0]
    raise UnreadableSlide(slide, f"--mask {mask} holds no {slide.stem}.png or {slide.stem}.geojson; add it")


def _read_mask(slide: Slide, grid: TileGrid, file: Path) -> np.ndarray:
    """(rows * cell, columns * cell) bool: areas of a GeoJSON file, or the pixels of an image that are not black."""
    mask = np.zeros((grid.rows * grid.cell, grid.columns * grid.cell), dtype=bool)
    width, height = grid.map_size
    if file.suffix.lower() in SHAPES:
        mask[:height, :width] = drawn_mask(file, (width, height), (slide.size[0] / width, slide.size[1] / height))
        return mask
    try:
        with open_image(file) as image:
            size = image.size
            pixels = np.asarray(image.convert("L").resize((width, height), Image.Resampling.NEAREST))
    except (ValueError, OSError) as error:
        raise UnreadableSlide(slide.path, f"its mask {file} cannot be read ({error})") from error
    if abs(size[0] * slide.size[1] / (size[1] * slide.size[0]) - 1) > ASPECT:
        reason = f"its mask {file} has {size[0]} x {size[1]} pixels, another aspect than the slide's"
        raise UnreadableSlide(slide.path, f"{reason} {slide.size[0]} x {slide.size[1]}; export it for the whole slide")
    mask[:height, :width] = pixels > 0
    return mask


def otsu(values: np.ndarray) -> int:
    """The threshold t of uint8 values whose classes {<= t} and {> t} have the largest variance between them."""
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below = counts.cumsum()  # (256,) how many are <= t
    above = below[-1] - below
    total = (counts * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = total / below - (total[-1] - total) / above
        between = np.nan_to_num(below * above * apart**2)
    return int(between.argmax())


def tissue_mask(picture: np.ndarray, small: float) -> np.ndarray:
    """(H, W) bool of a picture (H, W, 3) uint8, without specks of tissue and holes in it of under `small` pixels."""
    from scipy.ndimage import label, median_filter

    def without_small(mask: np.ndarray) -> np.ndarray:
        parts, _ = label(mask)  # connected over edges, not corners
        large = np.bincount(parts.ravel()) >= small
        large[0] = False  # what is not in the mask at all
        return large[parts]

    _, saturation, value = Image.fromarray(picture).convert("HSV").split()
    colour = np.where(np.asarray(value) < DARK, 0, np.asarray(saturation)).astype(np.uint8)
    colour = median_filter(colour, size=3)
    return ~without_small(~without_small(colour > max(otsu(colour), FLOOR)))


TISSUE: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {"otsu": tissue_mask}


@dataclass(frozen=True)
class Window:
    """A tile with enough tissue."""

    column: int
    row: int
    corner: tuple[float, float]  # level-0 pixels
    tissue: float  # share of it that is tissue


def find_windows(mask: np.ndarray, grid: TileGrid, least: float, overlap: float = 0.0) -> list[Window]:
    """Tiles, row by row, whose share of tissue is at least `least`; `overlap` is a share of their side."""
    sums = np.pad(mask.astype(np.int64).cumsum(0).cumsum(1), ((1, grid.cell), (1, grid.cell)), mode="edge")
    sums[0, :] = sums[:, 0] = 0
    stride, windows = 1 - overlap, []  # in tiles
    columns, rows = (int(np.ceil(n / (s * stride) - 1e-9)) for n, s in zip(grid.size, grid.step, strict=True))
    for row in range(rows):
        y = min(round(row * stride * grid.cell), mask.shape[0])
        for column in range(columns):
            x = min(round(column * stride * grid.cell), mask.shape[1])
            right, bottom = x + grid.cell, y + grid.cell
            inside = sums[bottom, right] - sums[y, right] - sums[bottom, x] + sums[y, x]
            share = float(inside / grid.cell**2)
            if share > 0 and share >= least:
                windows.append(Window(column, row, grid.corner(column * stride, row * stride), share))
    return windows


def find_tiles(
    slide: Slide, *, mpp: float, tile: int, tissue: str, mask: str | None, min_tissue: float, overlap: float = 0.0
) -> tuple[TileGrid, np.ndarray, np.ndarray, list[Window]]:
    """The grid of a slide, its thumbnail (H, W, 3), where that shows tissue (H, W), and the tiles with enough of it."""
    grid, file = make_grid(slide, mpp, tile), _mask_of(slide.path, mask)
    small = thumbnail(slide, grid)
    load_all()
    inside = _read_mask(slide, grid, file) if file else TISSUE[tissue](small, grid.cell**2 / 4)
    if inside.shape != small.shape[:2] or inside.dtype != bool:
        raise ValueError(f"--tissue {tissue} must return bool {small.shape[:2]}, not {inside.dtype} {inside.shape}")
    check_count(slide, *(math.ceil(n / (1 - overlap)) for n in (grid.columns, grid.rows)))
    windows = find_windows(inside, grid, min_tissue, overlap)
    if not windows:
        fix = "lower --min-tissue, or check --mpp and --tile"
        raise UnreadableSlide(slide.path, f"no tile has {min_tissue:.0%} tissue; {fix}")
    return grid, small, inside, windows

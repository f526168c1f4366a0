"""Which part of a slide is tissue: by a function on its thumbnail, or by the user's own mask.

    small, mask = find_tissue(slide, grid, TissueRule("otsu"))             # thumbnail and (H, W) bool
    windows = find_windows(mask, grid, least=0.5)                          # tiles with enough tissue, row by row

The built-in function takes saturated colour on pale glass, by Otsu's threshold. A plug-in replaces it:

    def dark(picture: np.ndarray, small: float) -> np.ndarray: ...         # (H, W, 3) uint8 -> (H, W) bool
    TISSUE["dark"] = dark                                                  # patchgen slide ... --tissue dark

Otsu (1979) splits a histogram so that the two classes are farthest apart. It always finds a split, so a floor prevents
the noise of empty glass from counting as tissue; a slide that is tissue from edge to edge has no glass to compare with,
and parts of it may be left out (docs/use/slides.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchgen.common.files import expanded
from patchgen.common.plugins import load_all, open_table
from patchgen.common.text import did_you_mean
from patchgen.data.safe_open import open_image
from patchgen.slides.annotations import drawn_mask
from patchgen.slides.slide import Slide, TileGrid, UnreadableSlide, thumbnail

SHAPES = (".geojson", ".json")
PICTURES = (".png", ".tif", ".tiff", ".bmp")
ASPECT = 0.02  # by how much the aspect of a mask may differ from its slide's
FLOOR = 15  # of 255: glass, even yellowed, is below this saturation
DARK = 40  # of 255: below this brightness (pen, edges, scanner's black) saturation is rounding noise


@dataclass(frozen=True)
class TissueRule:
    """How the tissue of a slide is found."""

    method: str = "otsu"  # a name in TISSUE
    mask: Path | None = None  # the user's mask of this slide; replaces the method

    def facts(self) -> dict[str, str]:
        """What results depend on; empty for the usual rule."""
        if self.mask is not None:
            return {"mask": hashlib.sha256(self.mask.read_bytes()).hexdigest()[:16]}
        return {} if self.method == "otsu" else {"tissue": self.method}


def check_rule(method: str, mask: str | None, slides: Sequence[Path]) -> None:
    """Check --tissue and --mask before any work."""
    load_all()
    if method not in TISSUE:
        raise ValueError(f"--tissue: unknown {method!r}{did_you_mean(method, TISSUE)} (known: {', '.join(TISSUE)})")
    if mask is None:
        return
    if not expanded(mask).exists():
        raise ValueError(f"--mask: there is no file or folder {mask}")
    if expanded(mask).is_file() and len(slides) > 1:
        raise ValueError(f"--mask {mask} is one file for {len(slides)} slides; give a folder of masks named like them")


def rule_for(slide: Path, method: str, mask: str | None) -> TissueRule:
    """The rule for one slide: in a folder of masks, that with the slide's name."""
    if mask is None or expanded(mask).is_file():
        return TissueRule(method, expanded(mask) if mask else None)
    for ending in (*PICTURES, *SHAPES):
        for name in (slide.stem, slide.name):
            if (file := expanded(mask) / f"{name}{ending}").is_file():
                return TissueRule(method, file)
    raise UnreadableSlide(slide, f"--mask {mask} holds no {slide.stem}.png or {slide.stem}.geojson; add it")


def find_tissue(slide: Slide, grid: TileGrid, rule: TissueRule) -> tuple[np.ndarray, np.ndarray]:
    """The thumbnail (H, W, 3) uint8 of the grid, and (H, W) bool where it shows tissue."""
    small = thumbnail(slide, grid)
    if rule.mask is not None:
        return small, _read_mask(slide, grid, rule.mask)
    load_all()
    mask = TISSUE[rule.method](small, grid.cell**2 / 4)
    if mask.shape != small.shape[:2] or mask.dtype != bool:
        raise ValueError(f"--tissue {rule.method} must return bool {small.shape[:2]}, not {mask.dtype} {mask.shape}")
    return small, mask


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
        raise UnreadableSlide(
            slide.path,
            f"its mask {file} has {size[0]} x {size[1]} pixels, another aspect than the slide's "
            f"{slide.size[0]} x {slide.size[1]}; export it for the whole slide",
        )
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
    """(H, W) bool of a small picture (H, W, 3) uint8.

    Args:
        small: Specks of tissue and holes in it with fewer pixels than this are removed.
    """
    from scipy.ndimage import median_filter

    _, saturation, value = Image.fromarray(picture).convert("HSV").split()
    colour = np.where(np.asarray(value) < DARK, 0, np.asarray(saturation)).astype(np.uint8)
    colour = median_filter(colour, size=3)
    mask = colour > max(otsu(colour), FLOOR)
    return ~_without_small(~_without_small(mask, small), small)


def _without_small(mask: np.ndarray, small: float) -> np.ndarray:
    """The mask without its connected parts (over edges, not corners) of fewer than `small` pixels."""
    from scipy.ndimage import label

    parts, _ = label(mask)
    large = np.bincount(parts.ravel()) >= small
    large[0] = False  # what is not in the mask at all
    return large[parts]


TissueFunction = Callable[[np.ndarray, float], np.ndarray]
TISSUE: dict[str, TissueFunction] = open_table("tissue", {"otsu": tissue_mask})


@dataclass(frozen=True)
class Window:
    """A tile with enough tissue."""

    column: int
    row: int
    corner: tuple[float, float]  # level-0 pixels
    tissue: float  # share of it that is tissue


def find_windows(mask: np.ndarray, grid: TileGrid, least: float, overlap: float = 0.0) -> list[Window]:
    """Tiles whose share of tissue is at least `least`, and never without any, row by row.

    Args:
        mask: (rows * cell, columns * cell) bool of the whole grid.
        overlap: Of neighbouring tiles, as a share of their side.
    """
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

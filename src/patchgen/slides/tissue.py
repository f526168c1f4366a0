"""Tissue detection: saturated colour on pale glass, by Otsu's threshold on a thumbnail.

    mask = tissue_mask(thumbnail(slide, grid), small=grid.cell**2 / 4)     # (H, W) bool
    share = tissue_share(mask, grid)                                       # (rows, columns) in [0, 1]

Otsu (1979) splits a histogram so that the two classes are farthest apart. It always finds a split, so a floor prevents
the noise of empty glass from counting as tissue; a slide that is tissue from edge to edge has no glass to compare with,
and parts of it may be left out (docs/use/slides.md).
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from patchgen.slides.tiles import TileGrid

FLOOR = 15  # of 255: glass, even yellowed, is below this saturation
DARK = 40  # of 255: below this brightness (pen, edges, scanner's black) saturation is rounding noise


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


def tissue_share(mask: np.ndarray, grid: TileGrid) -> np.ndarray:
    """How much of each tile is tissue: (rows, columns) in [0, 1]."""
    return mask.reshape(grid.rows, grid.cell, grid.columns, grid.cell).mean(axis=(1, 3))

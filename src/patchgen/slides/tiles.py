"""The grid of tiles over a slide, and a thumbnail of the slide on the same grid.

grid = make_grid(slide, mpp=0.5, tile=224)       # tiles of 112 microns, edge to edge
grid.box(column=3, row=1)                        # left, top, right, bottom in pixels of level 0
small = thumbnail(slide, grid)                   # grid.cell pixels per tile, so that a block of it is a tile
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from patchgen.slides.slide import Slide, UnreadableSlide

CELL = 16  # maximum pixels of the thumbnail per tile
LONGEST = 4096  # maximum longer side of the thumbnail in pixels, and of the grid in tiles
MOST_TILES = 1_000_000  # of a grid; 25 x 75 mm of glass in tiles of 56 microns have 600,000
STRIDE = 8  # tiles per side of the blocks in which the thumbnail is read
BLOCK = 8192  # maximum side of such a block in level-0 pixels, which are all read where the slide has no smaller level
FINER = 1.1  # how much finer than the slide a requested resolution may be: scanners differ by a few per cent


@dataclass(frozen=True)
class TileGrid:
    """Tiles from the upper left corner, edge to edge; the last column and row may reach beyond the slide."""

    step: tuple[float, float]  # extent of a tile in level-0 pixels; rarely whole numbers
    columns: int
    rows: int
    size: tuple[int, int]  # of the slide
    cell: int  # pixels per tile in the thumbnail and in maps

    def corner(self, column: int, row: int) -> tuple[float, float]:
        """Upper left corner in level-0 pixels."""
        return column * self.step[0], row * self.step[1]

    def box(self, column: int, row: int) -> tuple[int, int, int, int]:
        """Left, top, right, bottom in whole level-0 pixels, inside the slide; neighbours share their edges."""
        (left, top), (right, bottom) = self.corner(column, row), self.corner(column + 1, row + 1)
        return round(left), round(top), min(round(right), self.size[0]), min(round(bottom), self.size[1])

    @property
    def map_size(self) -> tuple[int, int]:
        """(width, height) of a map that covers exactly the slide, at `cell` pixels per tile."""
        width, height = (max(1, round(n * self.cell / s)) for n, s in zip(self.size, self.step, strict=True))
        return width, height


def make_grid(slide: Slide, mpp: float, tile: int) -> TileGrid:
    """Tiles of `tile` pixels at `mpp` microns per pixel.

    Raises:
        UnreadableSlide: the slide is coarser than that; its tiles would be blurred.
    """
    if not 0 < mpp < math.inf:
        raise ValueError(f"--mpp must be a positive number of microns a pixel, not {mpp}")
    if tile < 1:
        raise ValueError(f"--tile must be at least 1 pixel, not {tile}")
    if max(slide.mpp) > FINER * mpp:
        raise UnreadableSlide(
            slide.path,
            f"it has {max(slide.mpp):.3g} microns a pixel, too coarse for --mpp {mpp:g}; use a model trained at that "
            "resolution and ask for it, or give --mpp-slide where the file is wrong",
        )
    step = tile * mpp / slide.mpp[0], tile * mpp / slide.mpp[1]
    columns, rows = (math.ceil(n / s - 1e-9) for n, s in zip(slide.size, step, strict=True))
    check_count(slide, columns, rows)
    cell = min(CELL, max(1, LONGEST // max(columns, rows)))
    return TileGrid(step, columns, rows, slide.size, cell)


def check_count(slide: Slide, columns: int, rows: int) -> None:
    """Reject a slide of more tiles than any scanner makes, which would never end.

    Raises:
        UnreadableSlide: names the counts.
    """
    if max(columns, rows) > LONGEST or columns * rows > MOST_TILES:
        raise UnreadableSlide(
            slide.path,
            f"it claims {slide.size[0]:,} x {slide.size[1]:,} pixels, {columns * rows:,} tiles, at most "
            f"{MOST_TILES:,} and {LONGEST:,} on a side: the file is damaged or forged, or --mpp-slide or --tile is "
            "wrong",
        )


def thumbnail(slide: Slide, grid: TileGrid) -> np.ndarray:
    """The whole grid as (rows * cell, columns * cell, 3) uint8, read in blocks: a slide may have no small level."""
    picture = np.full((grid.rows * grid.cell, grid.columns * grid.cell, 3), 255, dtype=np.uint8)
    stride = max(1, min(STRIDE, int(BLOCK / max(grid.step))))
    for row in range(0, grid.rows, stride):
        for column in range(0, grid.columns, stride):
            high, wide = min(stride, grid.rows - row), min(stride, grid.columns - column)
            extent = wide * grid.step[0], high * grid.step[1]
            block = slide.read(grid.corner(column, row), extent, (wide * grid.cell, high * grid.cell))
            picture[row * grid.cell :, column * grid.cell :][: len(block), : block.shape[1]] = block
    return picture

"""A whole slide as one picture of known scale, from which any area can be read at any size, and its grid of tiles.

Coordinates are pixels of level 0, the slide's full resolution, counted from its upper left corner. OpenSlide runs in a
child process: if a forged slide makes it crash or hang, only that slide is lost.
"""

import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from patchgen.common.child_process import Child, ChildDied, ChildError, Message, serve
from patchgen.data.images import BILINEAR, resampling

INSTALL = 'whole slides need OpenSlide, which is not installed: pip install "patchgen[slides]"'
SECONDS = 120.0  # for one answer of the child; slides may be on a slow disk
SLIDE_SECONDS = 600.0  # for reading a slide in all, its tiles not counted
TILE_SECONDS = 0.2  # in addition for each tile, on average
MEMORY = 4 << 30  # bytes of the child's address space
TILE_SIDE = re.compile(r"openslide\.level\[\d+\]\.tile-(width|height)")
MOST_TILE = 8192  # pixels; scanners write tiles of 240 to 4096
MOST_READ = 1 << 27  # pixels of an area, in the level that it is read from
CELL = 16  # maximum pixels of the thumbnail per tile
LONGEST = 4096  # maximum longer side of the thumbnail in pixels, and of the grid in tiles
MOST_TILES = 1_000_000  # of a grid; 25 x 75 mm of glass in tiles of 56 microns have 600,000
STRIDE = 8  # tiles per side of the blocks in which the thumbnail is read
BLOCK = 8192  # maximum side of such a block in level-0 pixels, which are all read where the slide has no smaller level
FINER = 1.1  # how much finer than the slide a requested resolution may be: scanners differ by a few per cent
SLACK = 1.01  # a level that is a little too coarse (scanners round) still counts as fine enough


class UnreadableSlide(ValueError):
    """A slide that cannot be used; the reason ends with the fix."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot use slide {path}: {reason}")
        self.path, self.reason = Path(path), reason


def require_openslide() -> None:
    """ValueError if the extra is not installed."""
    try:
        import openslide  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL) from error


def open_slide(path: str | Path, mpp: float | None = None) -> "Slide":
    """Open a slide; `mpp`, microns per pixel of level 0, overrides the value in the file."""
    require_openslide()
    if not Path(path).is_file():
        reason = "is a folder, pipe or device, and a slide is a file" if Path(path).exists() else "does not exist"
        raise UnreadableSlide(path, f"it {reason}")
    with ExitStack() as on_error:
        child = Child(__name__, SECONDS, SLIDE_SECONDS)
        on_error.callback(child.close)
        try:
            facts, _ = child.ask({"open": str(path)})
        except ChildError as error:
            raise UnreadableSlide(path, f"OpenSlide says: {error}; for a plain image use `predict`") from error
        except ChildDied as error:
            raise UnreadableSlide(path, f"OpenSlide ended with {error}: the file is damaged or forged") from error
        # OpenSlide kills its process if a tile does not fit into memory
        for name, value in facts["properties"].items():
            if TILE_SIDE.fullmatch(name) and not (value.isascii() and value.isdigit() and int(value) <= MOST_TILE):
                raise UnreadableSlide(path, f"{name} is {value:.20}, at most {MOST_TILE}: it is damaged or forged")
        slide = Slide(Path(path), child, facts, (mpp, mpp) if mpp else _stated_mpp(path, facts["properties"]))
        on_error.pop_all()
    return slide


def _stated_mpp(path: str | Path, properties: dict[str, str]) -> tuple[float, float]:
    try:
        x, y = (float(properties.get(f"openslide.mpp-{axis}", "")) for axis in "xy")
    except ValueError:
        x = y = math.nan
    if not (0 < x < math.inf and 0 < y < math.inf):
        reason = "the file does not say how many microns a pixel has; give it with --mpp-slide"
        raise UnreadableSlide(path, f"{reason} (0.25 at 40x, 0.5 at 20x)")
    return x, y


class Slide:
    """An open slide; `open_slide` makes one."""

    def __init__(self, path: Path, child: Child, facts: dict[str, Any], mpp: tuple[float, float]) -> None:
        self.path, self.child, self.mpp = path, child, mpp  # mpp: microns per pixel of level 0, in x and y
        self.size: tuple[int, int] = (facts["dimensions"][0], facts["dimensions"][1])  # (width, height)
        self.downsamples: tuple[float, ...] = tuple(facts["level_downsamples"])
        self.properties: dict[str, str] = facts["properties"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close()

    @property
    def origin(self) -> tuple[int, int]:
        """Upper left corner of the scanned area in formats with empty margins (such as MIRAX); else (0, 0)."""
        try:
            x, y = (int(float(self.properties.get(f"openslide.bounds-{axis}", 0))) for axis in "xy")
        except (ValueError, OverflowError) as error:
            raise UnreadableSlide(self.path, f"its margins are no numbers ({error})") from error
        return x, y

    def allow(self, tiles: int) -> None:
        """Add the time for reading this many tiles."""
        self.child.total += TILE_SECONDS * tiles

    def best_level(self, downsample: float) -> int:
        """The coarsest level that is at least as fine, by OpenSlide's rule."""
        return max((level for level, factor in enumerate(self.downsamples) if factor <= downsample), default=0)

    def read_region(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """RGBA of an area; the corner is in pixels of level 0, the size in those of the level."""
        _, pixels = self.child.ask({"corner": corner, "level": level, "size": size})
        return Image.frombytes("RGBA", size, pixels)

    def read(
        self, corner: tuple[float, float], extent: tuple[float, float], size: tuple[int, int],
        interpolation: str = BILINEAR,
    ) -> np.ndarray:  # fmt: skip
        """An area of level 0 as (size[1], size[0], 3) uint8; white where the slide has no pixels."""
        level = self.best_level(SLACK * min(extent[0] / size[0], extent[1] / size[1]))
        scale = self.downsamples[level]
        taken = max(1, round(extent[0] / scale)), max(1, round(extent[1] / scale))
        if taken[0] * taken[1] > MOST_READ:
            area = f"an area of {taken[0]} x {taken[1]} pixels would be read at once"
            raise UnreadableSlide(self.path, f"{area}; check --mpp-slide and --tile")
        try:
            region = self.read_region((round(corner[0]), round(corner[1])), level, taken)
        except (ChildError, ChildDied) as error:
            place = f"x {corner[0]:.0f}, y {corner[1]:.0f}"
            raise UnreadableSlide(self.path, f"the area at {place} cannot be read: {error}") from error
        white = Image.new("RGB", region.size, "white")
        white.paste(region, mask=region.getchannel("A"))
        return np.array(white.resize(size, resampling(interpolation)) if taken != size else white)


@dataclass(frozen=True)
class TileGrid:
    """Tiles from the upper left corner, edge to edge; the last column and row may reach beyond the slide."""

    step: tuple[float, float]  # extent of a tile in level-0 pixels; rarely whole numbers
    columns: int
    rows: int
    size: tuple[int, int]  # of the slide
    cell: int  # pixels per tile in the thumbnail and in maps

    def corner(self, column: float, row: float) -> tuple[float, float]:
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
    """Tiles of `tile` pixels at `mpp` microns per pixel."""
    if max(slide.mpp) > FINER * mpp:
        reason = f"it has {max(slide.mpp):.3g} microns a pixel, too coarse for --mpp {mpp:g}"
        fix = "use a model trained at that resolution, or give --mpp-slide where the file is wrong"
        raise UnreadableSlide(slide.path, f"{reason}; {fix}")
    step = tile * mpp / slide.mpp[0], tile * mpp / slide.mpp[1]
    columns, rows = (math.ceil(n / s - 1e-9) for n, s in zip(slide.size, step, strict=True))
    check_count(slide, columns, rows)
    cell = min(CELL, max(1, LONGEST // max(columns, rows)))
    return TileGrid(step, columns, rows, slide.size, cell)


def check_count(slide: Slide, columns: int, rows: int) -> None:
    """Reject a slide of more tiles than any scanner makes, which would never end."""
    if max(columns, rows) > LONGEST or columns * rows > MOST_TILES:
        claim = f"{slide.size[0]:,} x {slide.size[1]:,} pixels, {columns * rows:,} tiles"
        most = f"at most {MOST_TILES:,} and {LONGEST:,} on a side"
        reason = "the file is damaged or forged, or --mpp-slide or --tile is wrong"
        raise UnreadableSlide(slide.path, f"it claims {claim}, {most}: {reason}")


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


def _answer_requests() -> None:
    """What runs in the child: OpenSlide, for one slide."""
    from openslide import OpenSlide

    slides: list[OpenSlide] = []

    def answer(request: dict[str, Any], _: bytes) -> Message:
        if "open" in request:
            slides.append(slide := OpenSlide(request["open"]))
            sizes = {"dimensions": slide.dimensions, "level_downsamples": slide.level_downsamples}
            return {**sizes, "properties": dict(slide.properties)}, b""
        corner, size = tuple(request["corner"]), tuple(request["size"])
        return {}, slides[0].read_region(corner, request["level"], size).tobytes()

    serve(answer, MEMORY)


if __name__ == "__main__":
    _answer_requests()

"""A whole slide as one picture of known scale, from which any area can be read at any size.

    with open_slide("biopsy.svs") as slide:
        pixels = slide.read((x, y), (448, 448), (224, 224))     # level-0 corner and extent -> (224,224,3) uint8

Coordinates are pixels of level 0, the slide's full resolution, counted from its upper left corner.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from PIL import Image

from patchgen.common.child_process import ChildDied, ChildError
from patchgen.common.files import regular
from patchgen.data.images import BILINEAR, resampling
from patchgen.slides.child import SlideChild

INSTALL = 'whole slides need OpenSlide, which is not installed: pip install "patchgen[slides]"'
TILE_SIDE = re.compile(r"openslide\.level\[\d+\]\.tile-(width|height)")
MOST_TILE = 8192  # pixels; scanners write tiles of 240 to 4096
MOST_READ = 1 << 27  # pixels of an area, in the level that it is read from
SLACK = 1.01  # a level that is a little too coarse (scanners round) still counts as fine enough


class UnreadableSlide(ValueError):
    """A slide that cannot be used; the message names the slide, the `reason` and the fix."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot use slide {path}: {reason}")
        self.path, self.reason = Path(path), reason


def require_openslide() -> None:
    """ValueError if the extra is not installed."""
    try:
        import openslide  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL) from error


def open_slide(path: str | Path, mpp: float | None = None) -> Slide:
    """Open a slide of any format that OpenSlide reads.

    Args:
        mpp: Microns per pixel of level 0; overrides the value in the file.

    Raises:
        UnreadableSlide: no such file, not a slide, or a slide of unknown scale.
    """
    require_openslide()
    if mpp is not None and not 0 < mpp < math.inf:
        raise ValueError(f"the slide's microns a pixel must be a positive number, not {mpp}")
    if not Path(path).exists():
        raise UnreadableSlide(path, "there is no such file")
    if not regular(path):
        raise UnreadableSlide(path, "it is a folder, pipe or device, and a slide is a file")
    try:
        handle = SlideChild(path)
    except ChildError as error:
        raise UnreadableSlide(path, f"OpenSlide says: {error}; for a plain image use `predict`") from error
    except ChildDied as error:
        raise UnreadableSlide(path, f"OpenSlide ended with {error}: the file is damaged or forged") from error
    try:
        _check_tiles(path, handle)
        return Slide(Path(path), handle, (mpp, mpp) if mpp else _stated_mpp(path, handle))
    except ValueError:
        handle.close()
        raise


def _check_tiles(path: str | Path, handle: SlideChild) -> None:
    """OpenSlide kills its process if a tile of the claimed size does not fit into memory: report it instead."""
    for name, value in handle.properties.items():
        if TILE_SIDE.fullmatch(name) and not (value.isascii() and value.isdigit() and int(value) <= MOST_TILE):
            raise UnreadableSlide(path, f"{name} is {value:.20}, at most {MOST_TILE}: the file is damaged or forged")


def _stated_mpp(path: str | Path, handle: SlideChild) -> tuple[float, float]:
    words = [handle.properties.get(f"openslide.mpp-{axis}", "") for axis in "xy"]
    try:
        x, y = (float(word) for word in words)
    except ValueError:
        x = y = math.nan
    if not (0 < x < math.inf and 0 < y < math.inf):
        raise UnreadableSlide(
            path,
            "the file does not say how many microns a pixel has; give it with --mpp-slide (0.25 at 40x, 0.5 at 20x)",
        )
    return x, y


class Slide:
    """An open slide; `open_slide` makes one."""

    def __init__(self, path: Path, handle: SlideChild, mpp: tuple[float, float]) -> None:
        self.path, self.handle, self.mpp = path, handle, mpp  # mpp: microns per pixel of level 0, in x and y
        self.size: tuple[int, int] = handle.dimensions  # (width, height)

    @property
    def origin(self) -> tuple[int, int]:
        """Upper left corner of the scanned area in formats with empty margins (such as MIRAX); else (0, 0)."""
        try:
            x, y = (int(float(self.handle.properties.get(f"openslide.bounds-{axis}", 0))) for axis in "xy")
        except (ValueError, OverflowError) as error:
            raise UnreadableSlide(self.path, f"its margins are no numbers ({error})") from error
        return x, y

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.handle.close()

    def read(
        self,
        corner: tuple[float, float],
        extent: tuple[float, float],
        size: tuple[int, int],
        interpolation: str = BILINEAR,
    ) -> np.ndarray:
        """An area of level 0 as (size[1], size[0], 3) uint8; white where the slide has no pixels.

        The coarsest level that is still fine enough is read and, antialiased, resized once.
        """
        wanted = min(extent[0] / size[0], extent[1] / size[1])
        level = self.handle.get_best_level_for_downsample(wanted * SLACK)
        scale = self.handle.level_downsamples[level]
        taken = max(1, round(extent[0] / scale)), max(1, round(extent[1] / scale))
        if taken[0] * taken[1] > MOST_READ:
            raise UnreadableSlide(
                self.path,
                f"an area of {taken[0]} x {taken[1]} pixels would be read at once; check --mpp-slide and --tile",
            )
        try:
            region = self.handle.read_region((round(corner[0]), round(corner[1])), level, taken)
        except (ChildError, ChildDied) as error:
            place = f"x {corner[0]:.0f}, y {corner[1]:.0f}"
            raise UnreadableSlide(self.path, f"the area at {place} cannot be read: {error}") from error
        white = Image.new("RGB", region.size, "white")
        white.paste(region, mask=region.getchannel("A"))
        return np.array(white.resize(size, resampling(interpolation)) if taken != size else white)

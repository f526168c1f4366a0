"""OpenSlide in a separate process: if a forged slide makes it crash or hang, only that slide is lost.

handle = SlideChild("biopsy.svs")                    # the part of `openslide.OpenSlide` that `Slide` uses
region = handle.read_region((0, 0), 0, (256, 256))   # the same pixels
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from PIL import Image

from patchgen.common.child_process import Child, Message, serve

if TYPE_CHECKING:
    from openslide import OpenSlide

SECONDS = 120.0  # for one answer; slides may be on a slow disk
SLIDE_SECONDS = 600.0  # for reading a slide in all, its tiles not counted
TILE_SECONDS = 0.2  # in addition for each tile, on average
MEMORY = 4 << 30  # bytes of the child's address space


class SlideChild:
    """A slide opened in a child process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.child = Child(__name__, SECONDS, SLIDE_SECONDS)
        try:
            facts, _ = self.child.ask({"open": os.fspath(path)})
        except BaseException:
            self.close()
            raise
        self.dimensions: tuple[int, int] = (facts["dimensions"][0], facts["dimensions"][1])
        self.level_downsamples: tuple[float, ...] = tuple(facts["level_downsamples"])
        self.properties: dict[str, str] = facts["properties"]

    def get_best_level_for_downsample(self, downsample: float) -> int:
        """The coarsest level that is at least as fine, by OpenSlide's rule."""
        return max((level for level, factor in enumerate(self.level_downsamples) if factor <= downsample), default=0)

    def read_region(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """RGBA of an area; the corner is in pixels of level 0, the size in those of the level."""
        _, pixels = self.child.ask({"corner": corner, "level": level, "size": size})
        return Image.frombytes("RGBA", size, pixels)

    def allow(self, tiles: int) -> None:
        """Add the time for reading this many tiles."""
        self.child.allow(TILE_SECONDS * tiles)

    def close(self) -> None:
        """End the child."""
        self.child.close()


class _Reader:
    """Runs in the child."""

    handle: OpenSlide

    def __call__(self, request: dict[str, Any], _: bytes) -> Message:
        from openslide import OpenSlide

        if "open" in request:
            self.handle = OpenSlide(request["open"])
            sizes = {"dimensions": self.handle.dimensions, "level_downsamples": self.handle.level_downsamples}
            return {**sizes, "properties": dict(self.handle.properties)}, b""
        region = self.handle.read_region(tuple(request["corner"]), request["level"], tuple(request["size"]))
        return {}, region.tobytes()


if __name__ == "__main__":
    serve(_Reader(), MEMORY)

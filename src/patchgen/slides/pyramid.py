"""Write a picture as a pyramid TIFF: tiles at every halving, so that a viewer reads only what it shows.

    write_pyramid("heatmap.tif", image, mpp=(7.0, 7.0), description="tile probabilities")

Pillow writes TIFFs in strips only, which slide viewers cannot page through; this is the part of the format that they
need: classic TIFF, 8-bit RGB, square tiles, deflate, resolution in pixels per centimetre.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from patchgen.common.files import replacing

TILE = 256
MICRONS = 10_000  # per centimetre
FORMATS = {"text": (2, "s"), "short": (3, "H"), "long": (4, "L"), "rational": (5, "L")}  # TIFF's number, struct's
Value = tuple[int, ...] | bytes
Entry = tuple[int, str, Value]  # tag, kind, value


def write_pyramid(
    path: str | Path, image: np.ndarray, mpp: tuple[float, float] | None = None, description: str = ""
) -> None:
    """Write `image` (H,W,3) uint8 and its halvings down to one tile, under a temporary name first.

    Args:
        mpp: Microns per pixel in x and y of the full image; not recorded by default.
        description: Plain text that viewers show as the image's description.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(f"a pyramid needs pixels (H,W,3) of uint8, got {image.dtype} {image.shape}")
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<2sHL", b"II", 42, 0))
        link = 4  # position of the offset of the next directory
        for level, pixels in enumerate(_halvings(image)):
            scale = (image.shape[1] / pixels.shape[1], image.shape[0] / pixels.shape[0])
            link = _write_level(file, pixels, level, _resolution(mpp, scale), description, link)


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


def _write_level(
    file: BinaryIO, pixels: np.ndarray, level: int, resolution: list[Entry], description: str, link: int
) -> int:
    """Write tiles, then their directory; returns the position of the next directory's offset."""
    offsets, sizes = [], []
    for tile in _tiles(pixels):
        offsets.append(file.tell())
        sizes.append(file.write(tile))
    height, width = pixels.shape[:2]
    entries: list[Entry] = [
        (254, "long", (int(level > 0),)),  # a reduced copy
        (256, "long", (width,)),
        (257, "long", (height,)),
        (258, "short", (8, 8, 8)),
        (259, "short", (8,)),  # deflate
        (262, "short", (2,)),  # RGB
        (277, "short", (3,)),
        (284, "short", (1,)),  # interleaved channels
        (322, "long", (TILE,)),
        (323, "long", (TILE,)),
        (324, "long", tuple(offsets)),
        (325, "long", tuple(sizes)),
        *resolution,
        *([(270, "text", description.encode("ascii", "replace") + b"\0")] if description and not level else []),
    ]
    return _write_directory(file, sorted(entries), link)


def _resolution(mpp: tuple[float, float] | None, scale: tuple[float, float]) -> list[Entry]:
    """Pixels per centimetre, as fractions over 1000."""
    if mpp is None:
        return []
    x, y = (round(1000 * MICRONS / (microns * times)) for microns, times in zip(mpp, scale, strict=True))
    return [(282, "rational", (x, 1000)), (283, "rational", (y, 1000)), (296, "short", (3,))]


def _write_directory(file: BinaryIO, entries: list[Entry], link: int) -> int:
    """Write a directory; values of more than four bytes precede it and are referenced by offset."""
    rows = []
    for tag, kind, value in entries:
        number, letter = FORMATS[kind]
        data = value if isinstance(value, bytes) else struct.pack(f"<{len(value)}{letter}", *value)
        count = len(value) // (2 if kind == "rational" else 1)
        if len(data) > 4:
            _align(file)
            data, long = struct.pack("<L", file.tell()), data
            file.write(long)
        rows.append(struct.pack("<HHL4s", tag, number, count, data))
    _align(file)
    start = file.tell()
    file.write(struct.pack("<H", len(rows)) + b"".join(rows) + struct.pack("<L", 0))
    end = file.tell()
    file.seek(link)
    file.write(struct.pack("<L", start))
    file.seek(end)
    return end - 4


def _align(file: BinaryIO) -> None:
    """The format requires even offsets."""
    if file.tell() % 2:
        file.write(b"\0")

"""Write a picture as a pyramid TIFF: tiles at every halving, so that a viewer reads only what it shows.

    write_pyramid("heatmap.tif", image, mpp=(7.0, 7.0), description="tile probabilities")

Pillow writes TIFFs in strips only, which slide viewers cannot page through; this is the part of the format that they
need: classic TIFF, 8-bit RGB, square tiles, deflate, resolution in pixels per centimetre.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from patchgen.common.files import replacing

TILE = 256
MICRONS = 10_000  # per centimetre
KINDS = {"s": 2, "H": 3, "L": 4, "2L": 5}  # struct's letters -> TIFF's number; the last is a fraction
Entry = tuple[str, Sequence[int] | bytes]  # kind, values


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
            entries: dict[int, Entry] = {
                254: ("L", (int(level > 0),)),  # a reduced copy
                256: ("L", (width,)),
                257: ("L", (height,)),
                258: ("H", (8, 8, 8)),
                259: ("H", (8,)),  # deflate
                262: ("H", (2,)),  # RGB
                277: ("H", (3,)),
                284: ("H", (1,)),  # interleaved channels
                322: ("L", (TILE,)),
                323: ("L", (TILE,)),
                324: ("L", offsets),
                325: ("L", sizes),
            }
            if description and not level:
                entries[270] = ("s", description.encode("ascii", "replace") + b"\0")
            if mpp:  # pixels per centimetre, as fractions over 1000
                x, y = mpp[0] * (image.shape[1] / width), mpp[1] * (image.shape[0] / height)
                entries[282] = ("2L", (round(1000 * MICRONS / x), 1000))
                entries[283] = ("2L", (round(1000 * MICRONS / y), 1000))
                entries[296] = ("H", (3,))
            link = _write_directory(file, entries, link)


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


def _write_directory(file: BinaryIO, entries: Mapping[int, Entry], link: int) -> int:
    """Write a directory, after the values of more than four bytes; returns the position of the next one's offset."""
    rows = []
    for tag, (kind, values) in sorted(entries.items()):
        data = values if isinstance(values, bytes) else struct.pack(f"<{len(values)}{kind[-1]}", *values)
        if len(data) > 4:
            position = _aligned(file)
            file.write(data)
            data = struct.pack("<L", position)
        rows.append(struct.pack("<HHL4s", tag, KINDS[kind], len(values) // (2 if kind == "2L" else 1), data))
    start = _aligned(file)
    file.write(struct.pack("<H", len(rows)) + b"".join(rows) + struct.pack("<L", 0))
    end = file.tell()
    file.seek(link)
    file.write(struct.pack("<L", start))
    file.seek(end)
    return end - 4


def _aligned(file: BinaryIO) -> int:
    """The next even position, which the format requires of offsets."""
    file.write(b"\0" * (file.tell() % 2))
    return file.tell()

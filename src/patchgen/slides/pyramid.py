"""Write a picture as a pyramid TIFF: tiles at every halving, so that a viewer reads only what it shows.

Pillow writes TIFFs in strips only, which slide viewers cannot page through; its directories are used here around tiles.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import IFDRational, ImageFileDirectory_v2

from patchgen.common.files import replacing

TILE = 256
MICRONS = 10_000  # per centimetre


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
            tags = ImageFileDirectory_v2()
            tags[254] = int(level > 0)  # a reduced copy
            tags[256], tags[257] = width, height
            tags[258] = 8, 8, 8  # bits
            tags[259], tags[262], tags[277], tags[284] = 8, 2, 3, 1  # deflate, RGB in three interleaved channels
            tags[322] = tags[323] = TILE
            tags[324], tags[325] = tuple(offsets), tuple(sizes)
            if description and not level:
                tags[270] = description.encode("ascii", "replace").decode()
            if mpp:  # pixels per centimetre
                for tag, microns, whole, side in zip((282, 283), mpp, image.shape[1::-1], (width, height), strict=True):
                    tags[tag] = IFDRational(round(1000 * MICRONS * side / (microns * whole)), 1000)
                tags[296] = 3
            file.write(b"\0" * (file.tell() % 2))  # offsets must be even
            start = file.tell()
            file.write(tags.tobytes(start))
            file.seek(link)
            file.write(struct.pack("<L", start))
            file.seek(0, 2)
            link = start + 2 + 12 * len(tags)


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

"""Open untrusted image files: supported formats, missing decoders by name, limits checked before any pixel is decoded.

A JPEG of kilobytes can have thousands of scans over its pixels, also inside a TIFF; a TIFF of a few pixels can have
tiles of gigabytes.
"""

import math
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from patchgen.data.listing import FORMATS

MISSING = {  # brand in the first bytes of a file -> how to install its decoder
    b"heic heix hevc heim heis mif1": 'HEIC needs the extra `heic`: pip install "patchgen[heic]", or save it as JPEG',
    b"avif avis": 'AVIF needs Pillow 11.3 or newer: pip install "pillow>=11.3", or save it as PNG',
}
BYTES = {"1": 1, "L": 1, "P": 1, "LA": 4, "I;16": 2, "I;16B": 2, "I;16L": 2}  # per pixel in memory; 4 for other modes
MOST_SIDE = 65_535
MOST_FILE = 1 << 30  # bytes of a file: it may be read as a whole
MOST_DECODED = 1 << 29  # bytes of pixels in memory
MOST_SCANS, MOST_SCANNED = 100, 2_000_000_000  # of a JPEG: scans, and scans x pixels
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers that give a JPEG's height and width
COMPRESSION, TILE_WIDTH, TILE_HEIGHT = 259, 322, 323  # tags of TIFF
STRIPS, TILES = (273, 279), (324, 325)  # offsets and lengths of the parts
OLD_JPEG, JPEG = 6, 7


class RefusedImage(ValueError):
    """An image violates one of our limits; the message ends with the fix."""


@contextmanager
def open_image(path: str | Path | BinaryIO) -> Iterator[Image.Image]:
    """`Image.open` of a plain file within our limits, else ValueError: how all untrusted files are opened."""
    if isinstance(path, (str, os.PathLike)):
        check_file(path)
    with open_header(path) as image:
        _check_limits(image)
        yield image


def open_header(path: str | Path | BinaryIO) -> Image.Image:
    """`Image.open` of the supported formats; RefusedImage for too many pixels or a decoder that is not installed."""
    try:
        return Image.open(path, formats=readable_formats())
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+ pixels", str(error))
        raise RefusedImage(_too_large(pixels[0] if pixels else "too many pixels")) from error
    except UnidentifiedImageError:
        with open(path, "rb") if isinstance(path, (str, os.PathLike)) else nullcontext(path) as file:
            file.seek(0)
            start = file.read(12)
        brand = start[8:12] if start[4:8] == b"ftyp" else b""  # of HEIC and AVIF files
        for brands, fix in MISSING.items():
            if brand in brands.split():
                raise RefusedImage(fix) from None
        raise


@cache
def readable_formats() -> tuple[str, ...]:
    """Pillow's names of the formats that this installation reads."""
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def check_file(path: str | Path) -> os.stat_result:
    """RefusedImage for a folder, pipe or device, and for too many bytes, most of which may be a hole on disk."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise RefusedImage("it is a folder, pipe or device, and an image is a file: remove it")
    if (size := about.st_size) > MOST_FILE:
        raise RefusedImage(f"a file of {size:,} bytes, at most {MOST_FILE:,}: save it again, or cut it into tiles")
    return about


def _too_large(pixels: str) -> str:
    most = f"{Image.MAX_IMAGE_PIXELS or MOST_DECODED // 4:,} in all, {MOST_SIDE:,} on a side"
    return f"image too large ({pixels}, at most {most}): cut it into tiles, or save it smaller"


def _check_limits(image: Image.Image) -> None:
    """RefusedImage for an open, not yet decoded image that would cost too much."""
    pixels, size = image.width * image.height, BYTES.get(image.mode, 4)
    # Pillow only warns up to twice its limit
    if pixels > (Image.MAX_IMAGE_PIXELS or math.inf) or max(image.size) > MOST_SIDE or pixels * size > MOST_DECODED:
        raise RefusedImage(_too_large(f"{image.width} x {image.height} pixels"))
    if image.format not in ("JPEG", "MPO", "TIFF"):
        return
    if image.format == "TIFF" and (padded := _padded(image)) * size > MOST_DECODED:
        raise RefusedImage(f"its tiles have {padded:,} pixels, at most {MOST_DECODED // size:,}: save it without tiles")
    file: BinaryIO = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(place)
    streams = _tiff_streams(image, data) if image.format == "TIFF" else [_jpeg_stream(data, pixels)]
    scans, scanned = max((s for s, _ in streams), default=1), sum(s * pixels for s, pixels in streams)
    if scans > MOST_SCANS or scanned > MOST_SCANNED:
        raise RefusedImage(f"a JPEG of {scans} scans, at most {MOST_SCANS}, and fewer where it is large: save it again")


def _jpeg_stream(data: bytes, pixels: int) -> tuple[int, int]:
    """(scans, pixels) of a JPEG; `pixels` if it does not state them."""
    at = 2
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda" and at < len(data):
        if data[at + 1] in FRAMES and len(data) >= at + 9:
            height, width = struct.unpack_from(">HH", data, at + 5)
            pixels = max(pixels, height * width)
        filler = data[at + 1 : at + 2] == b"\xff"
        at += 1 if filler else 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return max(1, data.count(b"\xff\xda", at)), pixels  # within a scan the byte 255 is followed by 0 or a restart


def _padded(image: Image.Image) -> int:
    """Pixels of a TIFF, including the padding of its tiles beyond its edges."""
    width, height = image.size
    tags = image.tag_v2  # type: ignore[attr-defined]
    if TILE_WIDTH in tags:
        across, down = int(tags[TILE_WIDTH]), int(tags.get(TILE_HEIGHT, height))
        if across < 1 or down < 1:
            raise RefusedImage("its tiles have no pixels: the file is damaged or forged, save it again")
        width, height = -(-width // across) * across, -(-height // down) * down
    return width * height


def _tiff_streams(image: Image.Image, data: bytes) -> list[tuple[int, int]]:
    """(scans, pixels) of the JPEGs in the parts of a TIFF; none if it uses another compression."""
    _refuse_repeated_tags(data)
    tags = image.tag_v2  # type: ignore[attr-defined]
    pixels = _padded(image)
    if tags.get(COMPRESSION) == OLD_JPEG:  # its stream may begin anywhere
        return [(max(1, data.count(b"\xff\xda")), pixels)]
    if tags.get(COMPRESSION) != JPEG:
        return []
    values = (tags.get(tag, ()) for tag in (TILES if TILES[0] in tags else STRIPS))
    starts, sizes = ([*map(int, value)] if isinstance(value, tuple) else [int(value)] for value in values)
    sizes += [0] * (len(starts) - len(sizes))
    if sum(sizes) > len(data):
        raise RefusedImage("its parts are longer than the file: it is damaged or forged, save it again")
    share = pixels // max(1, len(starts))
    whole = max(1, data.count(b"\xff\xda")), share  # of a part without a length, which may extend to the file's end
    places = zip(starts, sizes, strict=False)
    return [_jpeg_stream(data[start : start + size], share) if size else whole for start, size in places]


def _refuse_repeated_tags(data: bytes) -> None:
    """Of duplicate tags Pillow uses the last and libtiff, the decoder, the first."""
    order = "<" if data[:2] == b"II" else ">"
    big = 43 in data[2:4]
    (offset,) = struct.unpack_from(order + ("Q" if big else "L"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, offset)
    first, step = offset + (8 if big else 2), 20 if big else 12
    last = min(first + count * step, len(data) - 1)
    tags = [struct.unpack_from(order + "H", data, at)[0] for at in range(first, last, step)]
    if len(tags) != len(set(tags)):
        raise RefusedImage("a TIFF that gives one of its tags twice: it is damaged or forged, save it again")

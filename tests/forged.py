"""Files that were made to do harm: image bombs, and slides whose headers lie. Used by tests/hostile and tests/chaos."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)  # YAML whose aliases stand for gigabytes


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, length: int, colour: int = 0) -> bytes:
    """A PNG that claims this size and holds so many zero bytes, compressed a part at a time."""
    header, packer = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0), zlib.compressobj(9)
    zeros = [packer.compress(bytes(min(1 << 16, length - start))) for start in range(0, length, 1 << 16)]
    body = chunk(b"IHDR", header) + chunk(b"IDAT", b"".join(zeros) + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def progressive(scans: int, side: int = 64, noise: int = 0) -> bytes:
    """A progressive JPEG whose last scan is repeated: of one colour (scans of a few bytes), or of noise."""
    pixels = np.full((side, side), 77, np.uint8)
    if noise:
        pixels = np.random.default_rng(0).integers(0, noise, (side, side), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "JPEG", progressive=True)
    data = target.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + data[-2:]


def tiff(part: bytes, side: int, compression: int, *more: tuple[int, int]) -> bytes:
    """A gray TIFF of one part, with further (tag, number)s; tags 322 and 323 make the part a tile."""
    place = ((324, 8), (325, len(part))) if 322 in dict(more) else ((273, 8), (278, side), (279, len(part)))
    tags = [(256, side), (257, side), (258, 8), (259, compression), (262, 1), (277, 1), *place, *more]
    part += b"\0" * (len(part) % 2)
    rows = b"".join(struct.pack("<HHLL", tag, 4, 1, number) for tag, number in sorted(tags, key=lambda row: row[0]))
    return struct.pack("<2sHL", b"II", 42, 8 + len(part)) + part + struct.pack("<H", len(tags)) + rows + bytes(4)


def parts(count: int) -> bytes:
    """A TIFF of many JPEGs that all begin at one place and have no length: each could be as long as the file."""
    part = progressive(0, 8)
    end = 8 + len(part) + len(part) % 2
    tags = [(256, 1, 8), (257, 1, 8), (258, 1, 8), (259, 1, 7), (262, 1, 1), (273, count, end if count > 1 else 8),
            (277, 1, 1), (278, 1, 8), (279, count, end + 4 * count if count > 1 else 0)]  # fmt: skip
    head = struct.pack("<2sHL", b"II", 42, end + 8 * count) + part
    rows = b"".join(struct.pack("<HHLL", tag, 4, length, number) for tag, length, number in tags)
    places = struct.pack(f"<{count}L", *[8] * count) + bytes(4 * count)
    return head.ljust(end, b"\0") + places + struct.pack("<H", len(tags)) + rows + bytes(4)


def write_slide(path: Path) -> Path:
    """A pyramid of 600 x 600 pixels with tissue in its middle."""
    from patchgen.slides.heatmap import write_pyramid

    pixels = np.full((600, 600, 3), 244, np.uint8)
    pixels[100:500, 100:500] = np.random.default_rng(0).integers(90, 190, (400, 400, 3))
    write_pyramid(path, pixels, (0.5, 0.5))
    return path


def forge(path: Path, tags: tuple[int, ...], number: Callable[[], int | None]) -> Path:
    """Put a number into these tags of every directory of a TIFF; None leaves one as it is."""
    data = bytearray(path.read_bytes())
    offset = struct.unpack_from("<I", data, 4)[0]
    while offset:
        count = struct.unpack_from("<H", data, offset)[0]
        for entry in range(offset + 2, offset + 2 + 12 * count, 12):
            if struct.unpack_from("<H", data, entry)[0] in tags and (value := number()) is not None:
                struct.pack_into("<I", data, entry + 8, value)
        offset = struct.unpack_from("<I", data, offset + 2 + 12 * count)[0]
    path.write_bytes(data)
    return path


def write_empty_slide(path: Path, side: int, tile: int = 8192) -> Path:
    """A TIFF of `side` x `side` pixels at 0.5 microns, none of whose tiles has any bytes."""
    across = -(-side // tile)
    count = across * across
    tags = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1),
            (282, 5, 1, 8), (283, 5, 1, 8), (296, 3, 1, 3), (322, 4, 1, tile), (323, 4, 1, tile),
            (324, 4, count, 16), (325, 4, count, 16 + 4 * count)]  # fmt: skip
    head = struct.pack("<2sHLLL", b"II", 42, 16 + 8 * count, 20_000, 1)  # directory, resolution
    rows = b"".join(struct.pack("<HHLL", *tag) for tag in tags)
    path.write_bytes(head + bytes(8 * count) + struct.pack("<H", len(tags)) + rows + bytes(4))
    return path

"""Image files: which names count as images, how folders are listed, and how untrusted files are opened within limits.

Limits are checked before any pixel is decoded: a JPEG of kilobytes can have thousands of scans over its pixels, also
inside a TIFF; a TIFF of a few pixels can have tiles of gigabytes.
"""

import math
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import cache
from glob import has_magic
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image, UnidentifiedImageError

# Pillow's name of a format -> extensions. Pillow reads more formats, some by starting other programs.
FORMATS: dict[str, tuple[str, ...]] = {
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "PNG": (".png",),
    "PPM": (".ppm", ".pgm"),
    "BMP": (".bmp",),
    "DIB": (),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "GIF": (".gif",),  # the first frame
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif"),  # needs the extra `heic`
}
IMAGE_EXTENSIONS = tuple(ending for endings in FORMATS.values() for ending in endings)
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


class Files(NamedTuple):
    images: list[str]
    skipped: list[str]  # visible files that are not images


def is_visible(name: str) -> bool:
    """Whether a file or folder is used: not hidden, and not a leftover of an archive."""
    return not name.startswith(".") and name != "__MACOSX"


def visible_folders(folder: Path) -> list[Path]:
    """Visible sub-folders in code-point order of their names."""
    return sorted((p for p in folder.iterdir() if is_visible(p.name) and p.is_dir()), key=lambda p: p.name)


def is_image(name: str) -> bool:
    """Whether a file counts as an image: a visible name with a known extension, in any case."""
    return is_visible(name) and name.lower().endswith(IMAGE_EXTENSIONS)


def list_images(folder: Path) -> list[str]:
    """Images below a folder as relative posix paths, its own files before those of sub-folders (DomainBed's order).

    Links are followed, and a file with several names is listed once; ValueError for a link to a folder around it.
    """
    return list_files(folder).images


def list_files(folder: Path) -> Files:
    """`list_images`, and the other files that are not images."""
    files = list(_walk(folder, "", (os.path.realpath(folder),), None))
    images = sorted(file for file in files if is_image(file[1]))
    if any(linked for *_, linked in images):  # with links, real names come first
        first: dict[str, tuple[str, str, bool]] = {}
        for image in sorted(images, key=lambda image: image[2]):
            first.setdefault(os.path.realpath(folder / image[0] / image[1]), image)
        images = sorted(first.values())
    skipped = (file for file in files if not is_image(file[1]))
    return Files(*([f"{parent}/{name}".lstrip("/") for parent, name, _ in part] for part in (images, skipped)))


def _walk(
    folder: Path, parent: str, above: tuple[str, ...], visited: set[str] | None
) -> Iterator[tuple[str, str, bool]]:
    """(parent, name, reached through a link) of the visible files below a folder; `above`: its real parents."""
    # inside a link, the real folders visited there: links to links could double the work at each level
    behind: set[str] = set() if visited is None else visited
    with os.scandir(folder / parent) as entries:
        visible = sorted((entry for entry in entries if is_visible(entry.name)), key=lambda entry: entry.name)
    for entry in visible:
        link, name = entry.is_symlink(), entry.name
        if entry.is_dir():
            inner = f"{parent}/{name}".lstrip("/")
            real = os.path.realpath(entry.path) if link else os.path.join(above[-1], name)
            if link and any(path == real or path.startswith(real.rstrip(os.sep) + os.sep) for path in above):
                raise ValueError(f"'{entry.path}' links to '{real}', a folder that contains it; remove the link")
            if visited is None and not link:
                yield from _walk(folder, inner, (*above, real), None)
            elif real not in behind:
                behind.add(real)
                yield from _walk(folder, inner, (*above, real), behind)
        elif entry.is_file() or (link and is_image(name) and not os.path.exists(entry.path)):  # dangling: reported
            yield parent, name, link or visited is not None


def list_matching(pattern: Path) -> Files:
    """The files that a pattern with `**` matches, as paths; listed as by `list_files`, without link loops."""
    first = next(i for i, part in enumerate(pattern.parts) if has_magic(part))
    base, rest = Path(*pattern.parts[:first]), pattern.parts[first:]
    below = list_files(base) if base.is_dir() else Files([], [])
    return Files(*([str(base / name) for name in names if _matches(name.split("/"), rest)] for names in below))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def skipped_line(names: Sequence[str]) -> str:
    kinds = Counter(os.path.splitext(name)[1].lower() or "without an ending" for name in names)
    text = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0])))
    files = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return f"{files} skipped, no image by the ending: {text} (such as {names[0]})"


def finder(root: Path) -> Callable[[str], tuple[str, bool]]:
    """A function from a name to its real path, through links, and whether it is a file."""
    real_folder = cache(os.path.realpath)

    def find(name: str) -> tuple[str, bool]:
        file = os.path.join(root, name)
        folder, base = os.path.split(file)
        if "\0" in file:  # no path at all
            return file, False
        path = os.path.realpath(file) if os.path.islink(file) else os.path.join(real_folder(folder), base)
        return path, os.path.isfile(file)

    return find


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

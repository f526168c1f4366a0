"""Open untrusted image files: supported formats, named missing decoders, and limits.

    with open_image("scan.tif") as image: ...             # a Pillow image; ValueError if a limit is exceeded

`patchgen.data.images` decodes what is opened here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from patchgen.common.files import regular
from patchgen.data.limits import RefusedImage, check_length, check_limits
from patchgen.data.listing import FORMATS

MISSING = {  # brand in the first bytes of a file -> how to install its decoder
    b"heic heix hevc heim heis mif1": 'HEIC needs the extra `heic`: pip install "patchgen[heic]", or save it as JPEG',
    b"avif avis": 'AVIF needs Pillow 11.3 or newer: pip install "pillow>=11.3", or save it as PNG',
}


@contextmanager
def open_image(path: str | Path | BinaryIO) -> Iterator[Image.Image]:
    """`Image.open` of a plain file within our limits: the only way in which untrusted files are opened.

    Raises:
        ValueError: a limit is exceeded, or it is a pipe or device.
    """
    if isinstance(path, (str, os.PathLike)) and os.path.exists(path):
        if not regular(path):
            raise RefusedImage("it is a folder, pipe or device, and an image is a file: remove it")
        check_length(os.path.getsize(path))
    with open_header(path) as image:
        check_limits(image)
        yield image


def open_header(path: str | Path | BinaryIO) -> Image.Image:
    """`Image.open` of the supported formats; if a decoder is not installed, the error names it."""
    try:
        return Image.open(path, formats=readable_formats())
    except UnidentifiedImageError:
        for brands, needed in MISSING.items():
            if _brand(path) in brands.split():
                raise RefusedImage(needed) from None
        raise


@cache
def readable_formats() -> tuple[str, ...]:
    """Pillow's names of the formats that this installation reads."""
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _brand(path: str | Path | BinaryIO) -> bytes:
    """The brand of HEIC and AVIF files, in bytes 8 to 12."""
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as file:
            start = file.read(12)
    else:
        path.seek(0)
        start = path.read(12)
    return start[8:12] if start[4:8] == b"ftyp" else b""


def size_in_header(path: str | Path) -> tuple[int, int] | None:
    """Width and height of an image that `Image.open` rejects for its size: plugins read them without that check."""
    with open(path, "rb") as file:
        start = file.read(16)
        for factory, accept in [Image.OPEN[name] for name in readable_formats()]:
            file.seek(0)
            try:
                if accept is None or accept(start) is True:
                    return factory(file, str(path)).size
            except Exception:  # another format (plugins raise many types), or a plugin with its own check
                continue
    return None

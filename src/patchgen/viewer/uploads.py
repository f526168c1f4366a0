"""Uploaded images: checked before they are decoded, kept in memory only, least recently used removed first."""

from __future__ import annotations

import io
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, UnidentifiedImageError

from patchgen.data.images import BILINEAR, UnreadableImage
from patchgen.data.safe_open import open_header, readable_formats
from patchgen.viewer.decoding import Decoder
from patchgen.viewer.guard import Limits, RefusedRequest, megabytes

NAME = 120  # characters of a file's name that are shown


@dataclass(eq=False)
class Upload:
    id: str  # random; requests name the image by it
    name: str
    data: bytes  # the file, unchanged
    decoder: Decoder
    truth: str | None = None  # the true class, where it is known
    _pixels: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    _preview: bytes | None = None

    def pixels(self, size: int, interpolation: str = BILINEAR) -> np.ndarray:
        """(size, size, 3) uint8, exactly what `patchgen predict` would decode from the file."""
        if (size, interpolation) not in self._pixels:
            self._pixels[size, interpolation] = self.decoder.decode(self.data, size, interpolation)
        return self._pixels[size, interpolation]

    def preview(self) -> bytes:
        """The JPEG that the page shows: re-encoded by us, upright, aspect kept."""
        if self._preview is None:
            buffer = io.BytesIO()
            Image.fromarray(self.decoder.original(self.data)).save(buffer, "JPEG", quality=92)
            self._preview = buffer.getvalue()
        return self._preview


class UploadStore:
    """Uploads by id, bounded in bytes and number."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pictures: OrderedDict[str, Upload] = OrderedDict()
        self._lock, self._decoder = threading.Lock(), Decoder()

    def add(self, name: str, data: bytes, truth: str | None = None) -> Upload:
        """Check a file and keep it.

        Raises:
            UnreadableImage: not an image, or above a limit; the `reason` can be shown to users.
        """
        shown = clean_name(name)
        check_image(shown, data, self.limits)
        picture = Upload(secrets.token_urlsafe(12), shown, data, self._decoder, truth)
        with self._lock:
            self._pictures[picture.id] = picture
            while len(self._pictures) > self.limits.kept_images or self._bytes() > self.limits.kept_bytes:
                self._pictures.popitem(last=False)
        return picture

    def get(self, picture: str) -> Upload:
        with self._lock:
            if picture not in self._pictures:
                raise RefusedRequest(404, "this image is no longer kept; open it again")
            self._pictures.move_to_end(picture)
            return self._pictures[picture]

    def drop(self, picture: Upload) -> None:
        with self._lock:
            self._pictures.pop(picture.id, None)

    def __len__(self) -> int:
        return len(self._pictures)

    def _bytes(self) -> int:
        return sum(len(picture.data) for picture in self._pictures.values())


def clean_name(name: str) -> str:
    """The last part of a file's name, printable, on one line; a long one loses its beginning."""
    last = name.replace("\\", "/").rpartition("/")[2]
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in last).strip()
    return (printable if len(printable) <= NAME else "…" + printable[1 - NAME :]) or "image"


def check_image(name: str, data: bytes, limits: Limits) -> None:
    """Reject by its header an image that must not be decoded.

    Raises:
        UnreadableImage: with the reason.
    """
    if not data:
        raise UnreadableImage(name, "the file is empty (0 bytes)")
    if len(data) > limits.file_bytes:
        raise UnreadableImage(name, f"the file has {len(data) / 2**20:.1f} MB, at most {megabytes(limits.file_bytes)}")
    try:
        with open_header(io.BytesIO(data)) as image:
            width, height = image.size
    except UnidentifiedImageError:
        known = ", ".join(readable_formats())
        raise UnreadableImage(name, f"not an image of a known format ({known}), or damaged") from None
    except ValueError as error:  # a format whose decoder is not installed
        raise UnreadableImage(name, str(error), fix="") from error
    except Exception as error:  # Pillow's plugins raise many types on bad bytes
        raise UnreadableImage(name, f"{type(error).__name__}: {error}") from error
    if width * height > limits.pixels:
        reason = f"image too large ({width} x {height} pixels, at most {limits.pixels:,} in all): cut it into tiles"
        raise UnreadableImage(name, reason)

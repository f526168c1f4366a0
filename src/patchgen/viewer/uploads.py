"""Uploaded images: checked before they are decoded, kept in memory only, least recently used removed first.

A child process with limits decodes them: a file that hangs or crashes its decoder affects no other.
"""

import io
import secrets
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
from PIL import Image, UnidentifiedImageError

from patchgen.common.child_process import Child, ChildDied, ChildError, Message, serve
from patchgen.data.image_files import RefusedImage, open_header, readable_formats
from patchgen.data.images import BILINEAR, UnreadableImage, decode, reporting
from patchgen.draw.overlay import original
from patchgen.viewer import MEGABYTE, Limits, RefusedRequest

NAME = 120  # characters of a file's name that are shown
SECONDS = 30.0  # of decoding one image
MEMORY = 4 << 30  # bytes of the child's address space


class Decoder:
    """Starts its child process at first use, and a new one after a crash or timeout. Only the model thread uses it."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def decode(self, data: bytes, size: int | None = None, interpolation: str = BILINEAR) -> np.ndarray:
        """(size, size, 3) uint8, as `patchgen predict` decodes the file; without `size` upright, at its own aspect."""
        if self._child is None:
            self._child = Child(__name__, SECONDS)
            weakref.finalize(self, self._child.close)
        try:
            answer, pixels = self._child.ask({"size": size, "interpolation": interpolation}, data)
        except ChildDied as error:
            self._child.close()
            self._child = None
            raise UnreadableImage("image", f"it cannot be decoded ({error})") from error
        except ChildError as error:
            raise UnreadableImage("image", str(error), fix="") from error
        return np.frombuffer(pixels, np.uint8).reshape(answer["shape"])


def _decode_in_child(request: dict[str, Any], data: bytes) -> Message:
    file = cast(Any, io.BytesIO(data))  # Pillow takes files where `decode` and `original` say path
    try:
        pixels = decode(file, request["size"], request["interpolation"]) if request["size"] else original(file)
    except UnreadableImage as error:
        raise ValueError(error.reason) from error
    return {"shape": pixels.shape}, pixels.tobytes()


@dataclass(eq=False)
class Upload:
    id: str  # random; requests name the image by it
    name: str
    data: bytes  # the file, unchanged
    decoder: Decoder
    truth: str | None = None  # the true class, where it is known
    _pixels: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def pixels(self, size: int, interpolation: str = BILINEAR) -> np.ndarray:
        """(size, size, 3) uint8, exactly what `patchgen predict` would decode from the file."""
        if (size, interpolation) not in self._pixels:
            self._pixels[size, interpolation] = self.decoder.decode(self.data, size, interpolation)
        return self._pixels[size, interpolation]

    @cached_property
    def preview(self) -> bytes:
        """The JPEG that the page shows: re-encoded by us, upright, aspect kept."""
        buffer = io.BytesIO()
        Image.fromarray(self.decoder.decode(self.data)).save(buffer, "JPEG", quality=92)
        return buffer.getvalue()


class UploadStore:
    """Uploads by id, bounded in bytes and number."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._uploads: OrderedDict[str, Upload] = OrderedDict()
        self._lock, self._decoder = threading.Lock(), Decoder()

    def add(self, name: str, data: bytes, truth: str | None = None) -> Upload:
        """Check a file and keep it; UnreadableImage, with a reason for the user, if it is none or above a limit."""
        name = clean_name(name)
        check_image(name, data, self.limits)
        upload = Upload(secrets.token_urlsafe(12), name, data, self._decoder, truth)
        with self._lock:
            self._uploads[upload.id] = upload
            size = sum(len(each.data) for each in self._uploads.values())
            while len(self._uploads) > self.limits.kept_images or size > self.limits.kept_bytes:
                size -= len(self._uploads.popitem(last=False)[1].data)
        return upload

    def get(self, image: str) -> Upload:
        with self._lock:
            if image not in self._uploads:
                raise RefusedRequest(404, "this image is no longer kept; open it again")
            self._uploads.move_to_end(image)
            return self._uploads[image]

    def drop(self, image: str) -> None:
        with self._lock:
            self._uploads.pop(image, None)


def clean_name(name: str) -> str:
    """The last part of a file's name, printable, on one line; a long one loses its beginning."""
    last = name.replace("\\", "/").rpartition("/")[2]
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in last).strip()
    return (printable if len(printable) <= NAME else "…" + printable[1 - NAME :]) or "image"


def check_image(name: str, data: bytes, limits: Limits) -> None:
    """Raise UnreadableImage, by its header, for an image that must not be decoded."""
    with reporting(name):
        if not data:
            raise RefusedImage("the file is empty (0 bytes)")
        if len(data) > limits.file_bytes:
            most = f"at most {limits.file_bytes / MEGABYTE:g} MB"
            raise RefusedImage(f"the file has {len(data) / MEGABYTE:.1f} MB, {most}")
        try:
            width, height = open_header(io.BytesIO(data)).size
        except UnidentifiedImageError:
            known = ", ".join(readable_formats())
            raise RefusedImage(f"not an image of a known format ({known}), or damaged") from None
        if width * height > limits.pixels:
            size = f"{width} x {height} pixels, at most {limits.pixels:,} in all"
            raise RefusedImage(f"image too large ({size}): cut it into tiles")


if __name__ == "__main__":
    serve(_decode_in_child, MEMORY)

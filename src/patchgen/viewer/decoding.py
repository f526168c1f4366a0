"""Decode uploads in a child process with limits: one that hangs or crashes its decoder affects no other.

decoder = Decoder()
decoder.decode(data, 224)     # (224, 224, 3) uint8, as `patchgen predict` decodes the file
decoder.original(data)        # (H, W, 3) uint8, upright and at its own aspect
"""

from __future__ import annotations

import io
import threading
import weakref
from typing import Any, cast

import numpy as np

from patchgen.common.child_process import Child, ChildDied, ChildError, Message, serve
from patchgen.data.images import BILINEAR, UnreadableImage, decode
from patchgen.draw.overlay import original

SECONDS = 30.0  # for one picture
MEMORY = 4 << 30  # bytes of the child's address space


class Decoder:
    """Starts its child process at first use, and a new one after a crash or timeout."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._child: Child | None = None
        self._lock = threading.Lock()

    def decode(self, data: bytes, size: int, interpolation: str = BILINEAR) -> np.ndarray:
        """(size, size, 3) uint8."""
        return self._ask({"size": size, "interpolation": interpolation}, data)

    def original(self, data: bytes) -> np.ndarray:
        """(H, W, 3) uint8."""
        return self._ask({}, data)

    def _ask(self, request: dict[str, Any], data: bytes) -> np.ndarray:
        with self._lock:
            if self._child is None:
                self._child = Child(__name__, self.seconds)
                weakref.finalize(self, self._child.close)
            try:
                answer, pixels = self._child.ask(request, data)
            except ChildDied as error:
                self._child.close()
                self._child = None
                raise UnreadableImage("image", f"it cannot be decoded ({error})") from error
            except ChildError as error:
                raise UnreadableImage("image", str(error), fix="") from error
        return np.frombuffer(pixels, np.uint8).reshape(answer["shape"])


def _answer(request: dict[str, Any], data: bytes) -> Message:
    """Runs in the child."""
    file = cast(Any, io.BytesIO(data))  # Pillow takes files where `decode` and `original` say path
    try:
        pixels = decode(file, request["size"], request["interpolation"]) if "size" in request else original(file)
    except UnreadableImage as error:
        raise ValueError(error.reason) from error
    return {"shape": pixels.shape}, pixels.tobytes()


if __name__ == "__main__":
    serve(_answer, MEMORY)

"""OpenSlide in a process of its own: where a forged slide crashes or hangs it, that slide alone is lost.

    handle = SlideChild("biopsy.svs")                    # the part of `openslide.OpenSlide` that `Slide` uses
    region = handle.read_region((0, 0), 0, (256, 256))   # the same pixels

A request is a line of JSON, an answer a line of JSON and the pixels; neither process runs what the other one sends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

from PIL import Image

from patchgen.common.children import child_environment, python

SECONDS = 120.0  # for one answer; slides may be on a slow disk
MEMORY = 8 << 30  # bytes of address space


class SlideCrashed(OSError):
    """The process that reads the slide died or hung; the text says which."""


class SlideChild:
    """A slide that is open in a child process; calls from several threads wait for one another.

    Raises:
        OpenSlideError: what OpenSlide says of the file.
        SlideCrashed: it crashed, or gave no answer within `seconds`.
    """

    def __init__(self, path: str | os.PathLike[str], seconds: float = SECONDS) -> None:
        self.seconds, self._lock, self._late = seconds, threading.Lock(), False
        self._process = subprocess.Popen(
            python("-m", __name__, os.fspath(path)),
            env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            facts, _ = self._answer(None)
        except BaseException:
            self.close()
            raise
        self.dimensions: tuple[int, int] = (facts["dimensions"][0], facts["dimensions"][1])
        self.level_downsamples: tuple[float, ...] = tuple(facts["level_downsamples"])
        self.properties: dict[str, str] = facts["properties"]

    def get_best_level_for_downsample(self, downsample: float) -> int:
        """The coarsest level that is at least as fine, by OpenSlide's rule."""
        finer = [level for level, own in enumerate(self.level_downsamples) if own <= downsample]
        return finer[-1] if finer else 0

    def read_region(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """RGBA of an area; the corner is in pixels of level 0, the size in those of the level."""
        _, pixels = self._answer([corner, level, size])
        return Image.frombytes("RGBA", size, pixels)

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._process.wait()

    def _answer(self, request: Any) -> tuple[dict[str, Any], bytes]:
        """The child's next answer, to a request or, first of all, about the slide as a whole."""
        from openslide import OpenSlideError

        with self._lock:
            clock = threading.Timer(self.seconds, self._stop)
            clock.daemon = True
            clock.start()
            try:
                answer, pixels = self._exchange(request)
            except (OSError, ValueError, EOFError) as error:
                raise SlideCrashed(self._reason()) from error
            finally:
                clock.cancel()
        if "error" in answer:
            raise OpenSlideError(answer["error"])
        return answer, pixels

    def _exchange(self, request: Any) -> tuple[dict[str, Any], bytes]:
        to, answers = self._process.stdin, self._process.stdout
        assert to and answers
        if request is not None:
            to.write(json.dumps(request).encode() + b"\n")
            to.flush()
        answer = dict(json.loads(answers.readline()))  # nothing where it died: no JSON
        pixels = answers.read(answer.get("bytes", 0))
        if len(pixels) != answer.get("bytes", 0):
            raise EOFError
        return answer, pixels

    def _stop(self) -> None:
        self._late = True
        self._process.kill()

    def _reason(self) -> str:
        if self._late:
            return (
                f"OpenSlide gave no answer within {self.seconds:g} s: the file is damaged or forged, or its disk slow"
            )
        self._process.kill()
        return f"OpenSlide crashed on it (exit code {self._process.wait()}): the file is damaged or forged"


# In the child


def main(path: str) -> None:
    """Open the slide, describe it, and answer requests until there are no more."""
    if os.name == "posix":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    from openslide import OpenSlide

    try:
        handle = OpenSlide(path)
        facts = {"dimensions": handle.dimensions, "level_downsamples": handle.level_downsamples}
        _send(answers, {**facts, "properties": dict(handle.properties)})
    except Exception as error:  # of OpenSlide or ctypes: the parent says it
        _send(answers, {"error": str(error) or type(error).__name__})
        return
    for line in sys.stdin.buffer:
        corner, level, size = json.loads(line)
        try:
            pixels = handle.read_region(tuple(corner), level, tuple(size)).tobytes()
        except Exception as error:
            _send(answers, {"error": str(error) or type(error).__name__})
        else:
            _send(answers, {"bytes": len(pixels)}, pixels)


def _send(answers: IO[bytes], answer: dict[str, Any], pixels: bytes = b"") -> None:
    answers.write(json.dumps(answer).encode() + b"\n" + pixels)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])

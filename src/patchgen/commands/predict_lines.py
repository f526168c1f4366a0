"""The resumable output file of `predict`: one line per image, appended as it is predicted.

Until it is complete, the lines are in a hidden file next to the target. Its name contains a digest of the model and of
the images (path, size, time), so lines of another model or of other images are never continued, and a file with the
target's name is always complete.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from patchgen.common.files import lock, not_through_links

if TYPE_CHECKING:
    from patchgen.predict.predictor import Prediction


def csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


@dataclass(frozen=True)
class Lines:
    """A format with one line per image."""

    head: str  # first line, with its newline; empty if there is none
    line: Callable[[Prediction], str]  # with its newline
    key: Callable[[str], str]  # the path that a line is about
    name: Callable[[Path], str]  # a path as `key` gives it


def work_digest(model: str, head: str, paths: Sequence[Path]) -> str:
    """Twelve hex digits of everything that a file's lines depend on: model, format and images."""
    digest = hashlib.sha256(f"{model}\n{head}".encode("utf-8", "surrogateescape"))
    for name, path in sorted((str(path), path) for path in paths):
        try:
            size, time = path.stat().st_size, path.stat().st_mtime_ns
        except OSError:  # reported as unreadable when its turn comes
            size = time = -1
        # as typed too: that is how a line names its image
        digest.update(os.fsencode(f"{name}\0{os.path.abspath(path)}\0{size}\0{time}\0"))
    return digest.hexdigest()[:12]


class GrowingFile:
    """``with GrowingFile(target, digest, lines, paths) as file: file.write(prediction)``; renamed on success.

    Partial files of the same target with another model or other images are removed at the start of a new file and at
    the end of every one, unless a process is writing them.

    Args:
        model: Digest of the model.
        paths: All images of the file.

    Raises:
        ValueError: another process is writing the same file with the same model and images.
    """

    def __init__(self, target: Path, model: str, lines: Lines, paths: Sequence[Path]) -> None:
        self.target, self.lines = Path(os.path.realpath(target)) if target.is_symlink() else target, lines
        self.partial = self.target.with_name(f".{target.name}.{work_digest(model, lines.head, paths)}.part")

    def __contains__(self, path: Path) -> bool:
        return self.lines.name(path) in self.done

    def __enter__(self) -> Self:
        self.handle = self._locked()
        while not self._has_name():  # another process removed it before it was locked
            self.handle.close()
            self.handle = self._locked()
        self.done = self._read()
        if not self.done:
            self._remove_others()
        return self

    def _locked(self) -> BinaryIO:
        handle = open(self.partial, "a+b", opener=not_through_links)  # noqa: SIM115  closed in __exit__
        if not lock(handle.fileno()):
            handle.close()
            raise ValueError(f"{self.target} is being written by another process; wait for it, or end it")
        return handle

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.handle.fileno()), os.stat(self.partial))
        except FileNotFoundError:
            return False

    def _read(self) -> set[str]:
        """Images that already have a line; a last line truncated by a kill is removed."""
        self.handle.seek(0)
        head, size, done = self.lines.head.encode("utf-8", "backslashreplace"), 0, set()
        for line in self.handle:
            if not line.endswith(b"\n") or (size == 0 and head and line != head):
                break
            if size or not head:
                done.add(self.lines.key(line.decode("utf-8")))
            size += len(line)
        self.handle.truncate(size)
        if head and not size:
            self.handle.write(head)
        return done

    def write(self, found: Prediction) -> None:
        """Append one line and flush it, so that a killed process loses none."""
        self.handle.write(self.lines.line(found).encode("utf-8", "backslashreplace"))
        self.handle.flush()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self.handle:
            self.handle.flush()
            os.fsync(self.handle.fileno())
            if kind is None:
                os.replace(self.partial, self.target)
                self._remove_others()

    def _remove_others(self) -> None:
        """Remove partial files of this target that belong to other work and to no running process."""
        name = re.compile(re.escape(f".{self.target.name}.") + r"[0-9a-f]{12}\.part")
        for path in self.target.absolute().parent.iterdir():
            if name.fullmatch(path.name) and path.name != self.partial.name:
                with suppress(OSError), open(path, "rb", opener=not_through_links) as handle:
                    if lock(handle.fileno()):
                        path.unlink()

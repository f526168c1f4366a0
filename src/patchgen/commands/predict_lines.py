"""The file that `predict` fills: one line an image, appended as it is found, and taken up again after a kill.

Until all is there, the lines stand in a hidden file beside the target whose name carries the model's digest: another
model never goes on with the lines of this one, and what stands under the target's own name is always whole.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from patchgen.explain import Prediction


def csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


@dataclass(frozen=True)
class Lines:
    """A format of one line an image."""

    head: str  # first line, with its end; empty where there is none
    line: Callable[[Prediction], str]  # with its end
    key: Callable[[str], str]  # the path that a line is about
    name: Callable[[Path], str]  # a path as `key` gives it


class GrowingFile:
    """``with GrowingFile(target, digest, lines) as file: file.write(prediction)``; renamed when the block ends well.

    Raises:
        ValueError: another process is filling the same file with the same model.
    """

    def __init__(self, target: Path, model: str, lines: Lines) -> None:
        self.target, self.lines = target, lines
        self.partial = target.with_name(f".{target.name}.{model[:12]}.part")

    def __contains__(self, path: Path) -> bool:
        return self.lines.name(path) in self.done

    def __enter__(self) -> Self:
        from patchgen.train.records import lock

        self.handle = open(self.partial, "a+b")  # noqa: SIM115  closed in __exit__
        if not lock(self.handle.fileno()):
            self.handle.close()
            raise ValueError(f"{self.target} is being written by another process; wait for it, or end it")
        self.done = self._read()
        return self

    def _read(self) -> set[str]:
        """Images that have their line; a last line that a kill has cut short is cut off."""
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
        """Append one line; it is the system's before the next is made, so a killed process loses none."""
        self.handle.write(self.lines.line(found).encode("utf-8", "backslashreplace"))
        self.handle.flush()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self.handle:
            self.handle.flush()
            os.fsync(self.handle.fileno())
            if kind is None:
                os.replace(self.partial, self.target)

"""What was tried and what went wrong, as JSON and as the table of docs/develop/reliability.md."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOMS = ("kills", "faults", "inputs")


@dataclass
class Line:
    """One kind of fault or input."""

    room: str
    name: str
    tried: int = 0
    hit: int = 0  # kills that met a living process, inputs that were refused, damages that were noticed
    wrong: list[str] = field(default_factory=list)  # what a user should never see
    seconds: float = 0.0
    slowest: float = 0.0  # seconds of one input
    peak: int = 0  # bytes of memory of a process

    def add(self, other: Line) -> None:
        for name in ("tried", "hit", "wrong", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest, self.peak = max(self.slowest, other.slowest), max(self.peak, other.peak)


class Ledger:
    """The lines of one process, kept in a file, with progress on stderr."""

    def __init__(self, file: Path, quiet: bool = False) -> None:
        self.file, self.quiet, self.lines, self._began = file, quiet, list[Line](), time.monotonic()

    def line(self, room: str, name: str) -> Line:
        self.lines.append(Line(room, name))
        self._clock, self._told = time.monotonic(), 0
        return self.lines[-1]

    def tell(self, line: Line, total: int) -> None:
        """One line of progress; the file has all until now."""
        line.seconds = time.monotonic() - self._clock
        self.file.write_text(json.dumps([asdict(line) for line in self.lines]))
        if not self.quiet:
            passed, new = time.monotonic() - self._began, line.wrong[self._told :]
            self._told = len(line.wrong)
            text = f"[{passed:5.0f} s] {line.name}: {line.tried} of {total}, {len(line.wrong)} wrong"
            print(text, *(f"  WRONG: {problem}" for problem in new), sep="\n", file=sys.stderr, flush=True)


def joined(files: Iterable[Path], order: Sequence[tuple[str, str]]) -> list[Line]:
    """The lines of several ledgers, one for each (room, name), in that order."""
    sums = {key: Line(*key) for key in order}
    for file in (file for file in files if file.exists()):
        for line in (Line(**facts) for facts in json.loads(file.read_text())):
            sums[line.room, line.name].add(line)
    return [line for line in sums.values() if line.tried]


def page(found: dict[str, Any]) -> str:
    """The Markdown of docs/develop/reliability.md: every line, a sum of each room, and the limits that were seen."""
    lines, rows = [Line(**line) for line in found["lines"]], ["| what | tried | met | wrong |", "|---|---:|---:|---:|"]
    for room in ROOMS:
        of_room, total = [line for line in lines if line.room == room], Line(room, room)
        for line in of_room:
            total.add(line)
        rows += [_row(f"{room}: {line.name}", line) for line in of_room]
        rows += [_row(f"**{room}**", total)] if of_room else []
    slowest, peak = (max((getattr(line, name) for line in lines), default=0) for name in ("slowest", "peak"))
    limits = f"the slowest input {slowest:.1f} s, the most memory of a process {peak / 2**30:.2f} GB."
    return "\n".join([*rows, "", f"`{found['command']}`: {found['seconds'] / 60:.0f} minutes, {limits}"])


def _row(name: str, line: Line) -> str:
    return f"| {name} | {line.tried:,} | {line.hit:,} | {len(line.wrong):,} |"

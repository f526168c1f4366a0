"""What was tried and what went wrong: lines of a table, and JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Line:
    """One kind of fault or input."""

    name: str
    tried: int = 0
    hit: int = 0  # kills that met a living process, inputs that were refused, damages that were noticed
    wrong: list[str] = field(default_factory=list)  # what a user should never see
    seconds: float = 0.0
    slowest: float = 0.0  # seconds of one input
    peak: int = 0  # bytes of memory of a process


class Ledger:
    """Lines by room ("kills", "faults", "inputs"), with progress on stderr."""

    def __init__(self, quiet: bool = False) -> None:
        self.rooms: dict[str, list[Line]] = {}
        self.quiet, self._began = quiet, time.monotonic()
        self._told: dict[int, int] = {}  # how many wrong cases of a line have been said

    def line(self, room: str, name: str) -> Line:
        lines = self.rooms.setdefault(room, [])
        lines.append(Line(name))
        self._clock = time.monotonic()
        return lines[-1]

    def tell(self, line: Line, total: int) -> None:
        """One line of progress."""
        line.seconds = time.monotonic() - self._clock
        if not self.quiet:
            passed = time.monotonic() - self._began
            text = f"[{passed:5.0f} s] {line.name}: {line.tried} of {total}, {len(line.wrong)} wrong"
            new, self._told = line.wrong[self._told.get(id(line), 0) :], self._told | {id(line): len(line.wrong)}
            print(text, *(f"  WRONG: {one}" for one in new), sep="\n", file=sys.stderr, flush=True)

    @property
    def limits(self) -> str:
        """The slowest input and the most memory, in words."""
        lines = [line for lines in self.rooms.values() for line in lines]
        slowest, peak = (max((getattr(line, name) for line in lines), default=0) for name in ("slowest", "peak"))
        return f"slowest input {slowest:.1f} s, most memory of a process {peak / 2**30:.2f} GB"

    @property
    def wrong(self) -> list[str]:
        return [f"{line.name}: {text}" for lines in self.rooms.values() for line in lines for text in line.wrong]

    def to_json(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._began, 1)
        rooms = {room: [asdict(line) for line in lines] for room, lines in self.rooms.items()}
        return {"seconds": seconds, "wrong": len(self.wrong), **rooms}

    def table(self) -> str:
        """Markdown, one row a line."""
        rows = ["| what | tried | met | wrong | seconds |", "|---|---:|---:|---:|---:|"]
        for room, lines in self.rooms.items():
            rows += [_row(f"{room}: {line.name}", line) for line in lines]
            rows.append(_row(f"**{room}**", _sum(lines)))
        return "\n".join(rows)


def _row(name: str, line: Line) -> str:
    return f"| {name} | {line.tried} | {line.hit} | {len(line.wrong)} | {line.seconds:.0f} |"


def _sum(lines: Sequence[Line]) -> Line:
    wrong = [text for line in lines for text in line.wrong]
    return Line("", sum(x.tried for x in lines), sum(x.hit for x in lines), wrong, sum(x.seconds for x in lines))

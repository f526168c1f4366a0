"""What was tried and what went wrong: lines by room, as JSON and as the tables of docs/develop/reliability.md."""

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

    name: str
    tried: int = 0
    hit: int = 0  # kills that met a living process, inputs that were refused, damages that were noticed
    wrong: list[str] = field(default_factory=list)  # what a user should never see
    seconds: float = 0.0
    slowest: float = 0.0  # seconds of one input
    peak: int = 0  # bytes of memory of a process


class Ledger:
    """The lines of one process, kept in a file, with progress on stderr."""

    def __init__(self, file: Path, quiet: bool = False) -> None:
        self.file, self.quiet, self._began = file, quiet, time.monotonic()
        self.rooms: dict[str, list[Line]] = {room: [] for room in ROOMS}

    def line(self, room: str, name: str) -> Line:
        self.rooms[room].append(Line(name))
        self._clock, self._told = time.monotonic(), 0
        return self.rooms[room][-1]

    def tell(self, line: Line, total: int) -> None:
        """One line of progress; the file has all until now."""
        line.seconds = time.monotonic() - self._clock
        self.file.write_text(json.dumps({room: [asdict(one) for one in lines] for room, lines in self.rooms.items()}))
        if not self.quiet:
            passed, new = time.monotonic() - self._began, line.wrong[self._told :]
            self._told = len(line.wrong)
            text = f"[{passed:5.0f} s] {line.name}: {line.tried} of {total}, {len(line.wrong)} wrong"
            print(text, *(f"  WRONG: {one}" for one in new), sep="\n", file=sys.stderr, flush=True)


def joined(files: Iterable[Path], order: Sequence[tuple[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """The lines of several ledgers, one for each (room, name), in that order."""
    found: dict[tuple[str, str], Line] = {}
    for file in (file for file in files if file.exists()):
        for room, lines in json.loads(file.read_text()).items():
            for part in (Line(**line) for line in lines):
                whole = found.setdefault((room, part.name), Line(part.name))
                whole.tried, whole.hit = whole.tried + part.tried, whole.hit + part.hit
                whole.wrong, whole.seconds = whole.wrong + part.wrong, whole.seconds + part.seconds
                whole.slowest, whole.peak = max(whole.slowest, part.slowest), max(whole.peak, part.peak)
    there = [key for key in order if key in found]
    return {room: [asdict(found[key]) for key in there if key[0] == room] for room in ROOMS}


def page(found: dict[str, Any]) -> str:
    """The Markdown of docs/develop/reliability.md: every line, a sum of each room, and the limits that were seen."""
    rows = ["| what | tried | met | wrong |", "|---|---:|---:|---:|"]
    for room, lines in found["rooms"].items():
        rows += [_row(f"{room}: {line['name']}", [line]) for line in lines]
        rows += [_row(f"**{room}**", lines)] if lines else []
    lines = [line for room in found["rooms"].values() for line in room]
    slowest, peak = (max((line[name] for line in lines), default=0) for name in ("slowest", "peak"))
    return "\n".join([*rows, "", f"`{found['command']}`: {found['seconds'] / 60:.0f} minutes, the slowest input "
                      f"{slowest:.1f} s, the most memory of a process {peak / 2**30:.2f} GB."])  # fmt: skip


def _row(name: str, lines: Sequence[dict[str, Any]]) -> str:
    counts = (sum(line["tried"] for line in lines), sum(line["hit"] for line in lines),
              sum(len(line["wrong"]) for line in lines))  # fmt: skip
    return f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |"

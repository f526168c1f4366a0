"""A folder in which only one process works at a time: its lock, and whether its work is done.

    claim = RunFolder("runs/4f2a9c01b7de")
    with claim.locked(): ...            # RunBusy if another process holds it

The lock is released when the process ends, in whatever way, so another one can continue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchgen.common.files import lock, not_through_links, write_text

LOCK_ATTEMPTS, LOCK_PAUSE = 4, 0.05  # `busy` holds the lock for microseconds


class RunBusy(ValueError):
    """Another process works in this folder."""


class Claim:
    """A folder with a lock; subclasses define `done`."""

    verb = "trained"  # for messages

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def done(self) -> bool:
        raise NotImplementedError

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock inside this context."""
        with open(self.path / ".lock", "w", opener=not_through_links) as handle:
            for attempt in range(LOCK_ATTEMPTS):
                if lock(handle.fileno()):
                    break
                if attempt == LOCK_ATTEMPTS - 1:
                    raise RunBusy(f"{self.path} is being {self.verb} by another process; wait for it, or end it")
                time.sleep(LOCK_PAUSE)
            yield

    @property
    def busy(self) -> bool:
        """True while a process holds the lock."""
        if not (self.path / ".lock").exists():
            return False
        with open(self.path / ".lock", "a", opener=not_through_links) as handle:
            return not lock(handle.fileno())

    def write_json(self, name: str, value: Any) -> None:
        write_text(self.path / name, json.dumps(value, indent=2) + "\n")

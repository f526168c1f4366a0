"""What a person sees of long work: a bar with ETA on a terminal, a line an evaluation elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from patchgen.common.text import printable

PLAIN = {"main": "loss"}  # what a value is called on the screen; the terms of a method stand in the records


class Progress:
    """``with Progress("patchgen, unseen art", steps) as bar: bar.advance(); bar.show({...}); bar.say("...")``"""

    def __init__(self, title: str, total: int, done: int = 0, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console(stderr=True, quiet=quiet)
        self.live = self.console.is_terminal and not quiet
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = Bar(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task(escape(printable(title)), total=total, completed=done, note="")
        self.title, self.total, self.done = printable(title), total, done
        self.started, self.start_count = time.monotonic(), done

    def __enter__(self) -> Self:
        self.bar.start()
        if self.done:
            self.say(f"resumed at step {self.done}" if self.done < self.total else "resumed: every step is done")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.stop()

    def advance(self, count: int = 1) -> None:
        self.done += count
        self.bar.advance(self.task, count)

    def show(self, values: Mapping[str, float]) -> None:
        """Current values that have a plain name, at the end of the bar."""
        plain = [f"{PLAIN[name]} {value:.3g}" for name, value in values.items() if name in PLAIN]
        self.bar.update(self.task, note="  ".join(plain))

    def say(self, text: str) -> None:
        """A line that stays."""
        text = printable(text)
        if self.live:
            self.console.print(text, highlight=False, markup=False)
        elif not self.console.quiet:
            print(f"{self.title} [{self.done}/{self.total}, {self._left()} left] {text}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        fresh = self.done - self.start_count
        if not fresh:
            return "?"
        seconds = (time.monotonic() - self.started) / fresh * (self.total - self.done)
        return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"

"""Progress of long work: a bar with ETA on a terminal, one line per evaluation elsewhere. Always on stderr.

All lines of the library go through the logger `patchgen`, which prints them as they are unless the program that uses
it has given it a handler or a level: `logging.getLogger("patchgen").setLevel("WARNING")` silences progress.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from patchgen.common.text import duration, printable

SILENCE = 30.0  # seconds after which a file or pipe gets a line, whatever happens
WARM_UP = 6  # units after which the time left is said
logger = logging.getLogger("patchgen")
_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


class _Lines(logging.Handler):
    """Prints to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


if not logger.handlers:
    logger.addHandler(_Lines())
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


@contextmanager
def print_once() -> Iterator[None]:
    """Inside this context, `is_first` is true once per text, so that several trainings print common lines once."""
    outer = _said.get()
    token = _said.set(set() if outer is None else outer)
    try:
        yield
    finally:
        _said.reset(token)


def is_first(text: str) -> bool:
    """False for a text that was already passed, inside `print_once`."""
    said = _said.get()
    if said is None:
        return True
    news = text not in said
    said.add(text)
    return news


class Progress:
    """``with Progress("patchgen, unseen art", steps) as bar: bar.advance(); bar.show(loss); bar.say("...")``"""

    def __init__(self, title: str, total: int, done: int = 0, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        quiet = quiet or not logger.isEnabledFor(logging.INFO)
        self.console = Console(stderr=True, quiet=quiet)
        self.live = self.console.is_terminal and not quiet
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = Bar(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task(escape(printable(title)), total=total, completed=done, note="", left="")
        self.title, self.total, self.done = printable(title), total, done
        self.marks, self.spoke = deque[tuple[float, int]](maxlen=200), time.monotonic()  # (time, units done)

    def __enter__(self) -> Self:
        self.bar.start()
        if self.done:
            self.say(f"resumed at step {self.done}" if self.done < self.total else "resumed: every step is done")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.stop()

    def advance(self, count: int = 1) -> None:
        if not count:
            return
        self.done += count
        self.marks.append((time.monotonic(), self.done))
        self.bar.update(self.task, advance=count, left=self._left() if self.live else "")
        if not self.live and time.monotonic() - self.spoke >= SILENCE:
            self.say("running")

    def tick(self, count: int = 1, word: str = "images") -> None:
        """`advance`; without a visible bar, also print a line at about every tenth of the work."""
        before = 10 * self.done // self.total
        self.advance(count)
        if not self.live and 10 * self.done // self.total > before:
            self.say(word)

    def show(self, loss: float) -> None:
        """The current loss, at the end of the bar; the terms of a method are in the records."""
        self.bar.update(self.task, note=f"loss {loss:.3g}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.spoke = time.monotonic()
        text = printable(text)
        if self.live:
            self.console.print(text, highlight=False, markup=False)
        elif not self.console.quiet:
            left = f", {self._left()}" if self._left() else ""
            logger.info(f"{self.title} [{self.done}/{self.total}{left}] {text}")

    def _left(self) -> str:
        """\"12 min left\", or nothing at the end and for six units; the first fills caches, or waits for a scoring."""
        if len(self.marks) < WARM_UP or self.done >= self.total:
            return ""
        (start, first), (end, last) = self.marks[1], self.marks[-1]
        return f"{duration((end - start) / (last - first) * (self.total - self.done))} left"

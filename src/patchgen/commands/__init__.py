"""One file a command: its options as a typed signature, and what it prints."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from patchgen.names import did_you_mean

T = TypeVar("T")
FILE_WIDTH = 160  # columns of a table that is written to a file


def parse(what: Callable[..., T], name: str, argv: list[str], **more: Any) -> T:
    """A function or dataclass from the command's words."""
    import tyro

    return tyro.cli(what, prog=f"patchgen {name}", args=argv, **more)


def option(argv: list[str], name: str, default: str) -> str:
    """The value of one option, before the rest is parsed (a preset changes the others' defaults)."""
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"{name}="):
            return word.split("=", 1)[1]
    return default


def settings_of(arguments: Any, config: type[T], **changes: Any) -> T:
    """The run's settings out of a command's arguments."""
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return config(**{k: v for k, v in vars(arguments).items() if k in names} | changes)


def choose(
    actions: Mapping[str, Callable[..., None]], command: str, argv: list[str]
) -> tuple[Callable[..., None] | None, list[str]]:
    """The function that the first word names, and the words after it; None when only the list was asked for."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:<8} {(action.__doc__ or '').splitlines()[0]}" for name, action in actions.items()]
        print(f"usage: patchgen {command} {{{','.join(actions)}}} ...\n\n" + "\n".join(lines))
        return None, []
    if argv[0] not in actions:
        raise ValueError(f"unknown word {argv[0]!r}{did_you_mean(argv[0], actions)} (known: {', '.join(actions)})")
    return actions[argv[0]], argv[1:]


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """A table on stdout: as wide as the terminal, or `FILE_WIDTH` columns in a file; `styles` has one per row."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    table = Table(Column(header[0], no_wrap=True), *header[1:], header_style="bold")
    for i, row in enumerate(rows):
        # Text, because a plain string's [brackets] would be read as markup
        table.add_row(*(Text(cell, overflow="fold") for cell in row), style=styles[i] if styles else None)
    console.print(table)

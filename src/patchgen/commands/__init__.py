"""One file a command: its options as a typed signature, and what it prints."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from patchgen.common.text import did_you_mean, printable

T = TypeVar("T")
FILE_WIDTH = 160  # columns of a table that is written to a file
NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def parse(what: Callable[..., T], name: str, argv: list[str], **more: Any) -> T:
    """A function or dataclass from the command's words."""
    import tyro

    _check_numbers(what, argv)
    return tyro.cli(what, prog=f"patchgen {name}", args=argv, **more)


def option(argv: list[str], name: str, default: str) -> str:
    """The value of one option before the rest is parsed: a preset changes the others' defaults. The last one counts."""
    found = _values(argv, name, several=False)
    return found[-1] if found else default


def method_preset(argv: list[str], preset: str, usual: str) -> dict[str, Any]:
    """What the preset sets for the method that is named; help does without its rates, which take seconds to import."""
    from patchgen.config import PRESETS

    if asks_for_help(argv):
        return dict(PRESETS.get(preset, {}))
    from patchgen.methods.presets import preset_settings

    return preset_settings(preset, option(argv, "--method", usual))


def asks_for_help(argv: list[str]) -> bool:
    return bool({"-h", "--help"} & {*argv})


def before_preset(kind: type[T], name: str, argv: list[str]) -> T | None:
    """The command's words with the plain defaults, in whatever order they stand: what a preset is chosen by.

    None where help is asked for, which shows the defaults that the preset gives.
    """
    import tyro

    if asks_for_help(argv):
        return None
    nothing = dataclasses.MISSING
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    required = [f.name for f in fields if f.default is nothing and f.default_factory is nothing]
    return parse(kind, name, argv, default=kind(**dict.fromkeys(required, tyro.MISSING)))


def announce(quiet: bool = False) -> None:
    """Tell a person at a terminal that the command has begun: importing torch takes seconds."""
    if not quiet and sys.stderr.isatty():
        print("loading ...", file=sys.stderr, flush=True)


def require_data(data: str) -> None:
    """Refuse the empty word that an unset variable leaves, which would otherwise mean the current folder."""
    if not data.strip():
        raise ValueError("DATA is empty (an unset variable?); give a folder `domain/class/*.jpg` or a CSV manifest")


def settings_of(arguments: Any, config: type[T], **changes: Any) -> T:
    """The run's settings out of a command's arguments; an error names the option that is wrong."""
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    try:
        return config(**{k: v for k, v in vars(arguments).items() if k in names} | changes)
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        raise ValueError(f"{_option_name(first)} {rest}" if first in names else str(error)) from error


def _option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_numbers(what: Callable[..., Any], argv: list[str]) -> None:
    """Say in one sentence which option's value is no number; the parser would answer with names of types."""
    for name, hint in get_type_hints(what).items():
        parts = () if get_origin(hint) is dict else (hint, *get_args(hint))
        kinds = [kind for kind in parts if kind in NUMBERS]
        several, optional = ... in get_args(hint), type(None) in get_args(hint)
        for value in _values(argv, _option_name(name), several) if kinds else ():
            try:
                kinds[0](value)
            except ValueError:
                if not (optional and value == "None"):
                    raise ValueError(f"{_option_name(name)} must be {NUMBERS[kinds[0]]}, got {value!r}") from None


def _values(argv: list[str], option: str, several: bool) -> list[str]:
    """The words that stand behind an option, in either spelling of its name."""
    found: list[str] = []
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if _option_name(name.removeprefix("--")) == option and name.startswith("--"):
            behind = takewhile(lambda word: not word.startswith("--"), argv[i + 1 :])
            found += [value] if equals else list(behind) if several else list(behind)[:1]
    return found


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
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row), style=styles[i] if styles else None)
    console.print(table)

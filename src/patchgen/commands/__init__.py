"""One module per command: its options as a typed signature, and its output."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from patchgen.common.text import did_you_mean, printable
from patchgen.config import Settings

T = TypeVar("T")
S = TypeVar("S", bound=Settings)
FILE_WIDTH = 160  # width of tables written to a file
NOTHING = r"\(default:\W*None\)"  # what help says of an option that may be left out


def parse(what: Callable[..., T], name: str, argv: list[str], **more: Any) -> T:
    """A function or dataclass from the command's words, parsed once."""
    import tyro

    config = (tyro.conf.PositionalMetavarFromFieldName,)
    options = {"prog": f"patchgen {name}", "args": argv, "config": config, "registry": _numbers(), **more}
    if not {"-h", "--help"} & {*argv}:
        try:
            return tyro.cli(what, **options)
        except NotANumber as error:
            before = [word for word in argv[: _position(argv, error.word)] if word.startswith("--")]
            raise ValueError(
                f"{_option_name(before[-1].partition('=')[0][2:])} must be {error.rule}, got {error.word!r}"
            ) from None
    page = io.TextIOWrapper(io.BytesIO(), encoding=getattr(sys.stdout, "encoding", None) or "utf-8")
    try:
        with contextlib.redirect_stdout(page):
            return tyro.cli(what, **options)
    finally:
        page.seek(0)
        text = re.sub(r"\{None\}\|(\S+)|\{None,(\S+)", _without_none, page.read())
        print(re.sub(NOTHING, lambda found: re.sub(r"[^\W_]|[(:)]", " ", found[0]), text), end="")


def _without_none(found: re.Match[str]) -> str:
    """`INT` for `{None}|INT` and `{a,b}` for `{None,a,b}`, as wide as before."""
    return (found[1] or "{" + found[2]).ljust(len(found[0]))


def _position(argv: list[str], value: str) -> int:
    """Position of a value, alone or after the `=` of its option."""
    return next(i + ("=" in word) for i, word in enumerate(argv) if word == value or word.endswith(f"={value}"))


class NotANumber(Exception):
    """An argument that should be a number; raised instead of the parser's own error, for a short message."""

    def __init__(self, word: str, rule: str) -> None:
        self.word, self.rule = word, rule


def _numbers() -> Any:
    """Parsing rules for numbers, with readable errors instead of Python's."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()
    for kind, words in ((int, "a whole number"), (float, "a number")):

        @registry.primitive_rule
        def rule(info: Any, kind: Any = kind, words: str = words) -> Any:
            def made(given: list[str]) -> Any:
                try:
                    return kind(given[0])
                except ValueError:
                    if given[0] == "None":  # for an option that may be left out: another rule reads it
                        raise
                    raise NotANumber(given[0], words) from None

            if info.type is not kind:
                return None
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar=kind.__name__.upper(),
                instance_from_str=made,
                is_instance=lambda value: isinstance(value, kind),
                str_from_instance=lambda value: [str(value)],
            )

    return registry


def chosen(arguments: Any, argv: list[str]) -> dict[str, Any]:
    """The settings given on the command line, with their values, which a preset must not change."""
    words = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    names = [field.name for field in dataclasses.fields(arguments)]
    return {n: getattr(arguments, n) for n in names if {_option_name(n), f"--no-{_option_name(n)[2:]}"} & words}


def name_tracker(argv: list[str]) -> list[str]:
    """The same arguments with a bare `--track` replaced by `--track tensorboard`."""
    from patchgen.train.track import TRACKERS

    found = []
    for i, word in enumerate(argv):
        alone = word == "--track" and not TRACKERS.keys() & {*argv[i + 1 : i + 2]}
        found += [word, "tensorboard"] if alone else [word]
    return found


def announce(quiet: bool = False) -> None:
    """Print at a terminal that the command has started, because importing torch takes seconds."""
    if not quiet and sys.stderr.isatty():
        print("loading ...", file=sys.stderr, flush=True)


def require_data(data: str) -> None:
    """Reject an empty argument (from an unset variable), which would otherwise mean the current folder."""
    if not data.strip():
        raise ValueError("DATA is empty (an unset variable?); give a folder `domain/class/*.jpg` or a CSV manifest")


def merged(preset: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Command-line values over those of a preset or file; hyper-parameters are merged one by one."""
    found = {**preset, **words}
    if "hparams" in words:
        found["hparams"] = {**preset.get("hparams", {}), **words["hparams"]}
    return found


def settings_of(config: type[S], values: Mapping[str, Any]) -> S:
    """The settings of a run from those of `values` that it has; errors name the option."""
    names = {f.name for f in dataclasses.fields(config)}
    try:
        return config(**{name: value for name, value in values.items() if name in names})
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        raise ValueError(f"{_option_name(first)} {rest}" if first in names else str(error)) from error


def _option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def choose(
    actions: Mapping[str, Callable[..., None]], command: str, argv: list[str]
) -> tuple[Callable[..., None] | None, list[str]]:
    """The function named by the first argument, and the rest; None if only the list was requested."""
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

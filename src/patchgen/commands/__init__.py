"""One module per command. Its `COMMAND` is a function whose signature, or whose dataclass `arguments`, has the options.

With several words, such as `runs list` and `runs diff`, it is a table of functions; `DEFAULT` names the one that needs
no word. Commands with the settings of a run have `main(argv)`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from patchgen.common.files import check_writable, expanded
from patchgen.common.text import did_you_mean, printable
from patchgen.common.untrusted import outside

T = TypeVar("T")
COUNT, POSITIVE = "[1, inf]", "(0, inf)"  # intervals of numbers
Maybe = Annotated[
    T | None, tyro.conf.DisallowNone, tyro.conf.arg(help_behavior_hint="")
]  # an option that may be absent
FILE_WIDTH = 160  # width of tables written to a file
HELP = {"-h", "--help"}
# names in other programs -> ours, of which a command has one at most
ELSEWHERE = {
    "epochs": ("steps",),
    "num-epochs": ("steps", "epochs"),
    "batch-size": ("batch-per-domain", "batch"),
    "gpus": ("devices", "accelerator"),
    "device": ("accelerator",),
    "output": ("out",),
    "output-dir": ("out",),
    "learning-rate": ("lr",),
    "model": ("backbone",),
    "img-size": ("image-size",),
}


def parse(
    what: Callable[..., T], name: str, argv: list[str], config: Sequence[Any] = (), known: Iterable[str] = ()
) -> T:
    """A dataclass, or what a function returns, from the command's words.

    Args:
        config: Markers of tyro, instead of the usual ones.
        known: The names of the options, if they are not those of the arguments.

    Raises:
        ValueError: an unknown option, or a value that is no number.
    """

    @functools.wraps(what)
    def target(*values: Any, **named: Any) -> Callable[[], T]:  # called when no word is left over
        return functools.partial(what, *values, **named)

    try:
        made, unknown = tyro.cli(
            what if isinstance(what, type) else target, prog=f"patchgen {name}", args=argv, return_unknown_args=True,
            registry=_numbers(), config=config or (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone),
        )  # fmt: skip
    except NotANumber as error:
        before = [word for word in argv[: _position(argv, error.word)] if word.startswith("--")]
        raise ValueError(f"{option_name(before[-1].partition('=')[0][2:])} must be {error.rule}, got {error.word!r}") \
            from None  # fmt: skip
    if unknown:
        refuse_unknown(unknown, known or inspect.signature(what).parameters)
    return made if isinstance(what, type) else made()  # type: ignore[no-any-return]


def options_of(command: Callable[..., Any]) -> Any:
    """What tyro reads: the dataclass `arguments` of a function, or its own signature."""
    takes = "arguments" in inspect.signature(command).parameters
    return get_type_hints(command)["arguments"] if takes else command


def refuse_unknown(words: Sequence[str], known: Iterable[str]) -> None:
    """ValueError that names the first word that no option takes, with the nearest option."""
    options = [option_name(name) for name in known]
    word = next((word.partition("=")[0] for word in words if word.startswith("--")), words[0])
    if not word.startswith("-"):
        raise ValueError(f"unexpected word {word!r}; --help shows the options")
    ours = [name for other in ELSEWHERE.get(word[2:], ()) if (name := f"--{other}") in options]
    hint = f"; did you mean '{ours[0]}'?" if ours else did_you_mean(word, options)
    raise ValueError(f"there is no option {word}{hint} (--help lists all)")


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
            def number(texts: list[str]) -> Any:
                try:
                    return kind(texts[0])
                except ValueError:
                    if texts[0] == "None":  # for an option that may be left out: another rule reads it
                        raise
                    raise NotANumber(texts[0], words) from None

            if info.type is not kind:
                return None
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar=kind.__name__.upper(),
                instance_from_str=number,
                is_instance=lambda value: isinstance(value, kind),
                str_from_instance=lambda value: [str(value)],
            )

    return registry


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def announce(quiet: bool = False) -> None:
    """Print at a terminal that the command has started, because importing torch takes seconds."""
    if not quiet and sys.stderr.isatty():
        print("loading ...", file=sys.stderr, flush=True)


def require_data(data: str) -> None:
    """Reject an empty argument (from an unset variable), which would otherwise mean the current folder."""
    if not data.strip():
        raise ValueError("DATA is empty (an unset variable?); give a folder `domain/class/*.jpg` or a CSV manifest")


def check_bounds(arguments: Any, **intervals: str) -> None:
    """ValueError for the first of these options that is given and outside its interval, such as `[0, 1)`."""
    for name, interval in intervals.items():
        value = getattr(arguments, name)
        if value is not None and (rule := outside(value, interval)):
            raise ValueError(f"{option_name(name)} must be {rule}, not {value}")


def check_folder(out: str | Path) -> Path:
    """The folder to write, after a check before any work that it can be written."""
    folder = expanded(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder, but {out} is a file")
    check_writable(folder, "--out")
    return folder


def check_file(file: str | Path, option: str, *endings: str) -> Path:
    """The file to write, after a check before any work that it can be written."""
    target = expanded(file)
    if target.is_dir() or (endings and target.suffix.lower() not in endings):
        rule = f"a file that ends in {' or '.join(endings)}" if endings else "a file"
        raise ValueError(f"{option} must be {rule}, not {'the folder ' * target.is_dir()}{str(file)!r}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: the folder {target.parent} does not exist; make it first")
    check_writable(target, option)
    return target


def run(name: str, argv: list[str]) -> int:
    """Run a command and return its exit code."""
    module = import_module(f"patchgen.commands.{name}")
    if "--track" in argv:
        argv = expand_track(argv)
    if hasattr(module, "main"):
        return int(module.main(argv))
    command: Callable[..., Any] | Mapping[str, Callable[..., Any]] = module.COMMAND
    if isinstance(command, Mapping):
        word, default = argv[0] if argv else "--help", getattr(module, "DEFAULT", None)
        if word in command:
            name, argv, command = f"{name} {word}", argv[1:], command[word]
        elif default:
            command = command[default]
        elif word in HELP:
            lines = [f"  {word:<8} {(action.__doc__ or '').splitlines()[0]}" for word, action in command.items()]
            print(f"usage: patchgen {name} {{{','.join(command)}}} ...\n\n" + "\n".join(lines))
            return 0
        else:
            raise ValueError(f"unknown word {word!r}{did_you_mean(word, command)} (known: {', '.join(command)})")
    options = options_of(command)
    result = parse(options, name, argv)
    return (result if options is command else command(result)) or 0


def expand_track(argv: list[str]) -> list[str]:
    """The same words with a bare `--track` replaced by `--track tensorboard`."""
    from patchgen.train.track import TRACKERS

    words = []
    for i, word in enumerate(argv):
        alone = word == "--track" and not TRACKERS.keys() & {*argv[i + 1 : i + 2]}
        words += [word, "tensorboard"] if alone else [word]
    return words


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

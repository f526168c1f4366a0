"""One module per command. Its `COMMAND` is a function whose signature, or whose dataclass `arguments`, has the options.

With several words, such as `runs list` and `runs diff`, it is a table of functions; `DEFAULT` names the one that needs
no word. Commands with the settings of a run have `main(argv)`.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from patchgen.common.files import check_writable, expanded
from patchgen.common.text import did_you_mean, json_text, printable
from patchgen.common.untrusted import outside

T = TypeVar("T")
# an option that may be absent
Maybe = Annotated[T | None, tyro.conf.DisallowNone, tyro.conf.arg(help_behavior_hint="")]
FILE_WIDTH = 160  # width of tables written to a file
HELP = {"-h", "--help"}
LIGHT = {"completion", "datasets", "demo", "doctor", "methods", "oracle", "runs", "weights"}  # answer at once
# the intervals of options, wherever they appear; those of a run's settings are in `config`
BOUNDS = {
    **dict.fromkeys(("at_most", "batch", "count", "new_classes", "patch", "threads", "tile", "workers"), "[1, inf]"),
    **dict.fromkeys(("minutes", "mpp", "mpp_slide"), "(0, inf)"),
    "min_label": "(0.5, 1]", "min_tissue": "[0, 1]", "overlap": "[0, 1)", "port": "[0, 65535]",
    "retries": "[0, inf]", "spacing": "(0, 1000)", "wrong": "[0, inf]",
}  # fmt: skip
ELSEWHERE = {
    "batch-size": "batch-per-domain", "device": "accelerator", "epochs": "steps", "gpus": "devices",
    "learning-rate": "lr", "output-dir": "out",
}  # fmt: skip  # names in other programs -> ours


def parse(
    what: Callable[..., T], name: str, argv: list[str], config: Sequence[Any] = (), known: Iterable[str] = ()
) -> T:
    """A dataclass, or what a function returns; ValueError for an option not `known`, or a number out of bounds."""

    @functools.wraps(what)
    def target(*values: Any, **named: Any) -> Callable[[], T]:  # called when no word is left over
        return functools.partial(what, *values, **named)

    made, unknown = tyro.cli(
        what if isinstance(what, type) else target, prog=f"patchgen {name}", args=argv, return_unknown_args=True,
        config=config or (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone),
    )  # fmt: skip
    if unknown:
        refuse_unknown(unknown, known or inspect.signature(what).parameters)
    for name, interval in BOUNDS.items():
        value = getattr(made, name, None)
        if value is not None and (rule := outside(value, interval)):
            raise ValueError(f"{option_name(name)} must be {rule}, not {value}")
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
    ours = f"--{ELSEWHERE.get(word[2:])}"
    hint = f"; did you mean '{ours}'?" if ours in options else did_you_mean(word, options)
    raise ValueError(f"there is no option {word}{hint} (--help lists all)")


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    if "--only" not in argv and any(re.fullmatch(r"(--[\w-]+=)?\s*", word) for word in argv):  # there, of a column
        raise ValueError("a word of the command is empty (an unset variable?); give a value, or leave it out")
    if name not in LIGHT and sys.stderr.isatty() and not {*HELP, "--quiet"} & {*argv}:
        print("loading ...", file=sys.stderr, flush=True)  # importing torch takes seconds
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


def print_records(records: Sequence[Mapping[str, Any]], json: bool) -> None:
    """Records with the same fields, as JSON or as a table."""
    if json:
        print(json_text(records))
    else:
        print_table(list(records[0]), [[cell_text(value) for value in record.values()] for record in records])


def cell_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    return ", ".join(value) if isinstance(value, (list, tuple)) else str(value or "")

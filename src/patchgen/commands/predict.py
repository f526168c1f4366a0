"""patchgen predict MODEL IMAGES...: class and confidence of images, with any model or run, as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import announce, check_at_least, parse
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.options import EngineOptions, RuntimeOptions
from patchgen.common.files import check_writable, is_replaceable
from patchgen.common.text import csv_cell, json_text, printable

if TYPE_CHECKING:
    from patchgen.predict.predictor import Prediction, Predictor, Unreadable


@dataclass(frozen=True)
class PredictArguments(RuntimeOptions, EngineOptions):
    """Predict the class of images with a trained model. Resumable with the same command if a file is written."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files, folders (searched with their sub-folders) and patterns such as 'photos/**/*.jpg'."""
    csv: str | None = None
    """Write path, label, confidence and a column p_CLASS for each class to this file; `-` is standard output."""
    jsonl: str | None = None
    """Write one JSON object per line to this file; `-` is standard output."""
    json: bool = False
    """Print JSON instead of a table."""
    strict: bool = False
    """Exit with code 1 if any image could not be read, not only if none could."""
    batch: int = 64
    """Images per forward pass."""

    @property
    def file(self) -> str | None:
        """The file to write in parts; None for a stream (standard output, a device or a pipe)."""
        name = self.csv or self.jsonl
        return name if name not in (None, "-") and is_replaceable(str(name)) else None


COMMAND = PredictArguments


def main(argv: list[str]) -> int:
    arguments = parse(PredictArguments, "predict", argv)
    _check(arguments)
    announce()
    paths = find_images(arguments.images)
    from patchgen.common.machine import use_threads

    if arguments.alone:
        use_threads(arguments.threads)
    predictor = arguments.load(arguments.run, len(paths))
    if arguments.file:
        from patchgen.commands.predict_parts import write_file

        unreadable = write_file(arguments, arguments.file, predictor, paths)
        print(arguments.file)
    else:
        unreadable = _write_stream(arguments, predictor, paths)
    return report_unreadable(unreadable, len(paths), arguments.strict)


def _check(arguments: PredictArguments) -> None:
    """Check before any work what would otherwise fail at its end."""
    formats = [f"--{name}" for name in ("csv", "jsonl", "json") if getattr(arguments, name)]
    if len(formats) > 1:
        raise ValueError(f"{' and '.join(formats)} exclude each other: choose one")
    check_at_least(arguments, batch=1)
    arguments.check_engine()
    name = arguments.csv or arguments.jsonl
    if name in (None, "-"):
        if not arguments.alone:
            raise ValueError("--engine and --workers need a file to write to: add --csv FILE or --jsonl FILE")
        return
    file = Path(str(name))
    if file.is_dir():
        raise ValueError(f"{formats[0]} must be a file, but {file} is a folder; try {file / 'predictions.csv'}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{formats[0]} {file}: the folder {file.parent} does not exist; make it first")
    if arguments.file:
        check_writable(file.absolute().parent / file.name, formats[0])
    elif not arguments.alone:
        raise ValueError(f"--engine and --workers need a plain file to write to, and {file} is a device or pipe")


def line_format(arguments: PredictArguments, predictor: Predictor) -> tuple[str, Callable[[Prediction], str]]:
    """The first line (or nothing) of the requested file, and how a prediction becomes a line; with line ends."""
    if arguments.csv:
        flag = ["unlike_training"] if predictor.confidence.familiar else []
        names = ["path", "label", "confidence", *flag, *(f"p_{printable(name)}" for name in predictor.classes)]
        return _csv_line(names), lambda row: _csv_line(_cells(row))
    return "", lambda row: json_text(_record(row, predictor.classes), None) + "\n"


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cells(row: Prediction) -> list[str]:
    flag = [] if row.unlike_training is None else [str(row.unlike_training).lower()]
    path, label = (csv_cell(printable(text)) for text in (row.path, row.label))
    return [path, label, f"{row.confidence:.6f}", *flag, *(f"{p:.6f}" for p in row.probabilities)]


def _record(row: Prediction, classes: Sequence[str]) -> dict[str, Any]:
    flag = {} if row.unlike_training is None else {"unlike_training": row.unlike_training}
    probabilities = dict(zip(classes, map(float, row.probabilities), strict=True))
    return {"path": str(row.path), "label": row.label, "confidence": row.confidence, **flag,
            "probabilities": probabilities}  # fmt: skip


def _write_stream(arguments: PredictArguments, predictor: Predictor, paths: Sequence[Path]) -> list[Unreadable]:
    """Write each row as soon as it is predicted, without holding all in memory; returns the unreadable images."""
    from patchgen.common.progress import Progress
    from patchgen.predict.predictor import Unreadable

    unreadable: list[Unreadable] = []
    out = sys.stdout  # a live bar replaces it
    with ExitStack() as stack:
        if (name := arguments.csv or arguments.jsonl) not in (None, "-"):
            out = stack.enter_context(open(str(name), "w", encoding="utf-8", errors="backslashreplace"))
        bar = stack.enter_context(Progress("predicting", len(paths), quiet=out.isatty()))  # there the rows are progress

        def readable() -> Iterator[Prediction]:
            for row in predictor.predict(paths, arguments.batch, bar.tick):
                if isinstance(row, Unreadable):
                    unreadable.append(row)
                else:
                    yield row

        if arguments.csv or arguments.jsonl:
            head, line = line_format(arguments, predictor)
            out.write(head)
            out.writelines(map(line, readable()))
        elif arguments.json:
            out.writelines(_json_list(readable(), predictor.classes))
        else:
            out.writelines(_table(readable(), predictor.classes, paths))
    return unreadable


def _json_list(rows: Iterable[Prediction], classes: Sequence[str]) -> Iterator[str]:
    between = "[\n"
    for row in rows:
        yield between + json_text(_record(row, classes), None)
        between = ",\n"
    yield "[]\n" if between == "[\n" else "\n]\n"


def _table(rows: Iterable[Prediction], classes: Sequence[str], paths: Sequence[Path]) -> Iterator[str]:
    wide, label = max(4, *(len(printable(path)) for path in paths)), max(5, *(len(printable(name)) for name in classes))
    yield f"{'path':<{wide}}  {'label':<{label}}  confidence\n"
    for row in rows:
        unlike = "  unlike the training images" if row.unlike_training else ""
        yield f"{printable(row.path):<{wide}}  {printable(row.label):<{label}}  {row.confidence:10.4f}{unlike}\n"

"""patchgen predict MODEL IMAGES...: class and confidence of images, with any model or run, as a table, CSV or JSON."""

from __future__ import annotations

import csv as to_csv
import json as to_json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from patchgen.commands import announce, parse
from patchgen.commands.engine import EngineArguments
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.model_options import RuntimeOptions
from patchgen.common.files import check_writable, is_replaceable
from patchgen.common.text import csv_cell, json_text, printable

if TYPE_CHECKING:
    from patchgen.commands.predict_lines import Lines
    from patchgen.common.progress import Progress
    from patchgen.predict.predictor import Prediction, Predictor, Unreadable


@dataclass(frozen=True)
class PredictArguments(RuntimeOptions, EngineArguments):
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


def _readable(results: Iterable[Prediction | Unreadable], failed: list[Unreadable]) -> Iterator[Prediction]:
    from patchgen.predict.predictor import Unreadable

    for result in results:
        if isinstance(result, Unreadable):
            failed.append(result)
        else:
            yield result


def _header(predictor: Predictor) -> list[str]:
    flag = ["unlike_training"] if predictor.confidence.familiar else []
    return ["path", "label", "confidence", *flag, *(f"p_{printable(name)}" for name in predictor.classes)]


def _cells(found: Prediction) -> list[str]:
    flag = [] if found.unlike_training is None else [str(found.unlike_training).lower()]
    probabilities = (f"{p:.6f}" for p in found.probabilities)
    return [_key(found.path), csv_cell(printable(found.label)), f"{found.confidence:.6f}", *flag, *probabilities]


def _key(path: str | Path) -> str:
    return csv_cell(printable(path))


def _record(found: Prediction, classes: Sequence[str]) -> dict[str, Any]:
    flag = {} if found.unlike_training is None else {"unlike_training": found.unlike_training}
    probabilities = dict(zip(classes, map(float, found.probabilities), strict=True))
    return {"path": str(found.path), "label": found.label, "confidence": found.confidence, **flag,
            "probabilities": probabilities}  # fmt: skip


def _print_table(rows: Iterable[Prediction], classes: Sequence[str], paths: Sequence[Path], out: TextIO) -> None:
    wide, label = max(4, *(len(printable(path)) for path in paths)), max(5, *(len(printable(name)) for name in classes))
    print(f"{'path':<{wide}}  {'label':<{label}}  confidence", file=out)
    for row in rows:
        unlike = "  unlike the training images" if row.unlike_training else ""
        print(
            f"{printable(row.path):<{wide}}  {printable(row.label):<{label}}  {row.confidence:10.4f}{unlike}", file=out
        )


def _print_json(rows: Iterable[Prediction], classes: Sequence[str], out: TextIO) -> None:
    """A list written row by row, without holding it in memory."""
    between = "[\n"
    for row in rows:
        out.write(between + json_text(_record(row, classes), None))
        between = ",\n"
    out.write("[]\n" if between == "[\n" else "\n]\n")


def _check(arguments: PredictArguments) -> None:
    """Check before any work what would otherwise fail at its end."""
    chosen = [f"--{name}" for name in ("csv", "jsonl", "json") if getattr(arguments, name)]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other: choose one")
    if arguments.batch < 1:
        raise ValueError(f"--batch must be at least 1, not {arguments.batch}")
    arguments.check_engine()
    name = arguments.csv or arguments.jsonl
    if name in (None, "-"):
        return
    file = Path(str(name))
    if file.is_dir():
        raise ValueError(f"{chosen[0]} must be a file, but {file} is a folder; try {file / 'predictions.csv'}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{chosen[0]} {file}: the folder {file.parent} does not exist; make it first")
    if is_replaceable(file):
        check_writable(file.absolute().parent / file.name, chosen[0])


def lines_of(arguments: PredictArguments, predictor: Predictor) -> Lines:
    """How predictions are written as lines of the requested file or stream."""
    from patchgen.commands.predict_lines import Lines, csv_line

    if arguments.csv:
        return Lines(csv_line(_header(predictor)), lambda row: csv_line(_cells(row)),
                     lambda line: next(to_csv.reader([line]))[0], _key)  # fmt: skip
    return Lines("", lambda row: json_text(_record(row, predictor.classes), None) + "\n",
                 lambda line: to_json.loads(line)["path"], str)  # fmt: skip


def _to_file(arguments: PredictArguments, predictor: Predictor, paths: Sequence[Path], bar: Progress,
             failed: list[Unreadable]) -> None:  # fmt: skip
    """Append the missing predictions; the file gets its final name when it is complete."""
    from patchgen.commands.predict_lines import GrowingFile
    from patchgen.predict.predictor import identity

    target = Path(str(arguments.csv or arguments.jsonl))
    model = identity(arguments.run, arguments.checkpoint) + predictor.variant
    with GrowingFile(target, model, lines_of(arguments, predictor), paths) as file:
        left = [path for path in paths if path not in file]
        if len(left) < len(paths):
            bar.advance(len(paths) - len(left))
            bar.say("of an earlier attempt are reused")
        for row in _readable(predictor.predict(left, arguments.batch, bar.tick), failed):
            file.write(row)


def _to_stream(arguments: PredictArguments, predictor: Predictor, paths: Sequence[Path], rows: Iterable[Prediction],
               out: TextIO) -> None:  # fmt: skip
    if arguments.csv or arguments.jsonl:
        lines = lines_of(arguments, predictor)
        out.write(lines.head)
        out.writelines(map(lines.line, rows))
    elif arguments.json:
        _print_json(rows, predictor.classes, out)
    else:
        _print_table(rows, predictor.classes, paths, out)


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
    if not arguments.alone:
        from patchgen.commands.predict_parts import predict_parts

        return predict_parts(arguments, predictor, paths)
    # A live bar replaces sys.stdout, so rows go to the original stream; on a terminal they are the progress.
    out, failed = sys.stdout, list["Unreadable"]()
    file = arguments.csv or arguments.jsonl
    to_stream = file in (None, "-")
    with ExitStack() as opened:
        if file and not to_stream and not is_replaceable(file):  # a device or pipe: rows are streamed
            out = opened.enter_context(open(file, "w", encoding="utf-8", errors="backslashreplace"))
            to_stream = True
        _predict(arguments, predictor, paths, failed, out, to_stream)
    if not to_stream:
        print(file, file=out)
    return report_unreadable(failed, len(paths), arguments.strict)


def _predict(arguments: PredictArguments, predictor: Predictor, paths: Sequence[Path], failed: list[Unreadable],
             out: TextIO, to_stream: bool) -> None:  # fmt: skip
    from patchgen.common.progress import Progress

    with Progress("predicting", len(paths), quiet=out.isatty() and to_stream) as bar:
        if to_stream:
            results = predictor.predict(paths, arguments.batch, bar.tick)
            _to_stream(arguments, predictor, paths, _readable(results, failed), out)
        else:
            _to_file(arguments, predictor, paths, bar, failed)

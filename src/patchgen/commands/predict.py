"""patchgen predict RUN IMAGES...: class and confidence of images, with any run, as a table, CSV or JSON."""

from __future__ import annotations

import csv as to_csv
import json as to_json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from patchgen.commands import announce, parse

if TYPE_CHECKING:
    from patchgen.explain import Prediction, Unreadable
    from patchgen.train.progress import Progress


@dataclass(frozen=True)
class PredictArguments:
    """Predict the class of images with a trained run."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, as `patchgen train` prints it."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files, folders (searched with their sub-folders) and patterns such as 'photos/**/*.jpg'."""
    csv: str | None = None
    """Write path, label, confidence and a column p_CLASS for each class to this file; `-` is standard output."""
    json: bool = False
    """Print JSON instead of a table."""
    checkpoint: Literal["selected", "swad"] = "selected"
    """The checkpoint chosen on source validation, or the weight average of a run trained with --swad."""
    strict: bool = False
    """Exit with code 1 when any image could not be read, not only when all could not."""
    batch: int = 64
    """Images a forward pass."""


def find_images(words: Sequence[str]) -> list[Path]:
    """Files as they are, images below folders, matches of patterns: each once, in the order of the words.

    Raises:
        ValueError: a word that leads to no image.
    """
    found: dict[Path, None] = {}
    for word in words:
        images = _images_of(word)
        if not images:
            raise ValueError(_nothing_at(word))
        found.update(dict.fromkeys(images))
    if not found:
        raise ValueError("no image given; name files, folders or patterns such as 'photos/**/*.jpg' after the run")
    return list(found)


def _images_of(word: str) -> list[Path]:
    from patchgen.data.table import is_image, list_images

    path = Path(word).expanduser()
    if not word.strip():
        return []  # Path("") would be the current folder
    if path.is_dir():
        return [path / name for name in list_images(path)]
    if path.exists():
        return [path]
    if not has_magic(word):
        return []
    matches = sorted(Path(match) for match in glob(str(path), recursive=True))
    return [match for match in matches if match.is_file() and is_image(match.name)]


def _nothing_at(word: str) -> str:
    from patchgen.data.table import IMAGE_EXTENSIONS

    path, endings = Path(word).expanduser(), " ".join(IMAGE_EXTENSIONS)
    if not word.strip():
        return "no image found: a word is empty (an unset variable?)"
    if path.is_dir():
        return f"no image found: the folder {shown(word)} and its sub-folders hold none ({endings})"
    if has_magic(word):
        return f"no image found: no file with a known ending ({endings}) matches the pattern {shown(word)}"
    there = next(parent for parent in path.absolute().parents if parent.exists())
    return f"no image found: {shown(word)} does not exist (its path ends at {shown(there)})"


def shown(path: str | Path) -> str:
    """A path on one printable line, whatever bytes its name has."""
    return str(path).encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def ticker(bar: Progress) -> Callable[[int], None]:
    """Moves the bar; where there is none to see, says a line at about every tenth of the work."""

    def tick(count: int) -> None:
        before = 10 * bar.done // bar.total
        bar.advance(count)
        if not bar.live and 10 * bar.done // bar.total > before:
            bar.say("images")

    return tick


def report_unreadable(failed: Sequence[Unreadable], total: int, strict: bool) -> int:
    """List on stderr what could not be read; the exit code is 1 when that is everything or, with `strict`, anything."""
    if failed:
        print(f"{len(failed)} of {total} images could not be read:", file=sys.stderr)
        for one in failed:
            print(f"  {shown(one.path)}: {shown(one.reason)}", file=sys.stderr)
    return 1 if failed and (strict or len(failed) == total) else 0


def _readable(results: Iterable[Prediction | Unreadable], failed: list[Unreadable]) -> Iterator[Prediction]:
    from patchgen.explain import Unreadable

    for result in results:
        if isinstance(result, Unreadable):
            failed.append(result)
        else:
            yield result


def _header(classes: Sequence[str]) -> list[str]:
    return ["path", "label", "confidence", *(f"p_{name}" for name in classes)]


def _cells(found: Prediction) -> list[str]:
    return [shown(found.path), found.label, f"{found.confidence:.6f}", *(f"{p:.6f}" for p in found.probabilities)]


def _print_table(rows: Iterable[Prediction], classes: Sequence[str], paths: Sequence[Path], out: TextIO) -> None:
    wide, label = max(4, *(len(shown(path)) for path in paths)), max(5, *map(len, classes))
    print(f"{'path':<{wide}}  {'label':<{label}}  confidence", file=out)
    for row in rows:
        print(f"{shown(row.path):<{wide}}  {row.label:<{label}}  {row.confidence:10.4f}", file=out)


def _print_json(rows: Iterable[Prediction], classes: Sequence[str], out: TextIO) -> None:
    """A list written row by row, so that its length needs no memory."""
    between = "[\n"
    for row in rows:
        probabilities = dict(zip(classes, map(float, row.probabilities), strict=True))
        record = {"path": str(row.path), "label": row.label, "confidence": row.confidence}
        out.write(between + to_json.dumps({**record, "probabilities": probabilities}))
        between = ",\n"
    out.write("[]\n" if between == "[\n" else "\n]\n")


def _check(arguments: PredictArguments) -> None:
    """Refuse before any work what could only fail at its end."""
    if arguments.csv and arguments.json:
        raise ValueError("--csv and --json exclude each other: choose one")
    if arguments.batch < 1:
        raise ValueError(f"--batch must be at least 1, not {arguments.batch}")
    if arguments.csv in (None, "-"):
        return
    file = Path(str(arguments.csv))
    if file.is_dir():
        raise ValueError(f"--csv must be a file, but {file} is a folder; try {file / 'predictions.csv'}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--csv {file}: the folder {file.parent} does not exist; make it first")


def _write(arguments: PredictArguments, rows: Iterable[Prediction], classes: Sequence[str], paths: Sequence[Path],
           out: TextIO) -> None:  # fmt: skip
    from patchgen.data.table import write_csv

    if arguments.csv == "-":
        writer = to_csv.writer(out, lineterminator="\n")
        writer.writerow(_header(classes))
        writer.writerows(map(_cells, rows))
    elif arguments.csv:
        write_csv(arguments.csv, _header(classes), map(_cells, rows))
        print(arguments.csv, file=out)
    elif arguments.json:
        _print_json(rows, classes, out)
    else:
        _print_table(rows, classes, paths, out)


def main(argv: list[str]) -> int:
    arguments = parse(PredictArguments, "predict", argv)
    _check(arguments)
    announce()
    paths = find_images(arguments.images)
    from patchgen.explain import load_run
    from patchgen.train.progress import Progress

    predictor = load_run(arguments.run, arguments.checkpoint)
    # A live bar takes sys.stdout over, so rows go to the stream of before; on a terminal they are the progress.
    out, failed = sys.stdout, list["Unreadable"]()
    rows_on_screen = out.isatty() and arguments.csv in (None, "-")
    with Progress("predicting", len(paths), quiet=rows_on_screen) as bar:
        results = predictor.predict(paths, arguments.batch, ticker(bar))
        _write(arguments, _readable(results, failed), predictor.classes, paths, out)
    return report_unreadable(failed, len(paths), arguments.strict)

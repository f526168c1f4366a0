"""patchgen predict MODEL IMAGES...: class and confidence of images, with any model or run, as a table, CSV or JSON.

A file is made in parts of whole batches, which a stopped command or several processes share, in a hidden folder next to
the target. Its name has a digest of the model, the format and the images, so that parts of others are never used.
"""

import csv
import hashlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from patchgen.commands import check_file
from patchgen.commands.options import EngineOptions, ImageOptions, RuntimeOptions, find_images, report_unreadable
from patchgen.common.files import is_replaceable, refuse_links, replacing, write_text
from patchgen.common.progress import Progress
from patchgen.common.text import csv_cell, json_text, printable
from patchgen.common.untrusted import read_json

if TYPE_CHECKING:
    from patchgen.predict.predictor import Prediction, Predictor, Unreadable
    from patchgen.sweep.jobs import Unit

PART = 256  # approximate number of images of a part


@dataclass(frozen=True, kw_only=True)
class PredictArguments(ImageOptions, RuntimeOptions, EngineOptions):
    """Predict the class of images with a trained model. Resumable with the same command if a file is written."""

    csv: str | None = None
    """Write path, label, confidence and a column p_CLASS for each class to this file; `-` is standard output."""
    jsonl: str | None = None
    """Write one JSON object per line to this file; `-` is standard output."""
    json: bool = False
    """Print JSON instead of a table."""
    batch: int = 64
    """Images per forward pass."""


def predict(arguments: PredictArguments) -> int:
    formats = [f"--{name}" for name in ("csv", "jsonl", "json") if getattr(arguments, name)]
    if len(formats) > 1:
        raise ValueError(f"{' and '.join(formats)} exclude each other: choose one")
    name = arguments.csv or arguments.jsonl
    streamed = name in (None, "-") or not (is_replaceable(str(name)) or Path(str(name)).is_dir())  # a device, a pipe
    file = None if streamed else check_file(str(name), formats[0])
    if not file and not arguments.alone:
        raise ValueError("--engine and --workers need a plain file to write to: add --csv FILE or --jsonl FILE")
    paths = find_images(arguments.images)
    arguments.use_threads()
    predictor = arguments.load(len(paths))
    if file:
        unreadable = _write_file(arguments, file, predictor, paths)
        print(name)
    else:
        unreadable = _write_stream(arguments, predictor, paths)
    return report_unreadable(unreadable, len(paths), arguments.strict)


class Format(NamedTuple):
    """A prediction becomes a line; `head` is before all of them, `between` between two, `end` after all."""

    line: "Callable[[Prediction], str]"
    head: str = ""
    between: str = ""
    end: str = ""


def _format(arguments: PredictArguments, predictor: "Predictor", paths: Sequence[Path] = ()) -> Format:
    classes = predictor.classes
    if arguments.csv:
        flag = ["unlike_training"] if predictor.confidence.familiar else []
        names = ["path", "label", "confidence", *flag, *(f"p_{printable(name)}" for name in classes)]
        return Format(_csv_line, _csv(names))
    if arguments.jsonl:
        return Format(lambda row: json_text(_record(row, classes), None) + "\n")
    if arguments.json:
        return Format(lambda row: "\n" + json_text(_record(row, classes), None), "[", ",", "\n]\n")
    path, label = (max([4, *(len(printable(name)) for name in names)]) + 2 for names in (paths, ("label", *classes)))

    def line(row: "Prediction") -> str:
        unlike = "  unlike the training images" if row.unlike_training else ""
        return f"{printable(row.path):<{path}}{printable(row.label):<{label}}{row.confidence:10.4f}{unlike}\n"

    return Format(line, f"{'path':<{path}}{'label':<{label}}confidence\n")


def _csv(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _csv_line(row: "Prediction") -> str:
    flag = [] if row.unlike_training is None else [str(row.unlike_training).lower()]
    names = (csv_cell(printable(text)) for text in (row.path, row.label))
    return _csv([*names, f"{row.confidence:.6f}", *flag, *(f"{p:.6f}" for p in row.probabilities)])


def _record(row: "Prediction", classes: Sequence[str]) -> dict[str, Any]:
    flag = {} if row.unlike_training is None else {"unlike_training": row.unlike_training}
    probabilities = dict(zip(classes, map(float, row.probabilities), strict=True))
    return {"path": str(row.path), "label": row.label, "confidence": row.confidence, **flag,
            "probabilities": probabilities}  # fmt: skip


def _write_stream(arguments: PredictArguments, predictor: "Predictor", paths: Sequence[Path]) -> "list[Unreadable]":
    """Write each row as soon as it is predicted, without holding all in memory; returns the unreadable images."""
    from patchgen.predict.predictor import Unreadable

    unreadable: list[Unreadable] = []
    out, form = sys.stdout, _format(arguments, predictor, paths)  # a live bar replaces stdout
    with ExitStack() as stack:
        if (name := arguments.csv or arguments.jsonl) not in (None, "-"):
            out = stack.enter_context(open(str(name), "w", encoding="utf-8", errors="backslashreplace"))
        bar = stack.enter_context(Progress("predicting", len(paths), quiet=out.isatty()))  # there the rows are progress
        out.write(form.head)
        between = ""
        for row in predictor.predict(paths, arguments.batch, bar.tick):
            if isinstance(row, Unreadable):
                unreadable.append(row)
            else:
                out.write(between + form.line(row))
                between = form.between
        out.write(form.end)
    return unreadable


# A file in parts


def _write_file(
    arguments: PredictArguments, file: Path, predictor: "Predictor", paths: Sequence[Path]
) -> "list[Unreadable]":
    """Predict the missing parts, write the file, and return the unreadable images."""
    from patchgen.predict.predictor import Unreadable, identity
    from patchgen.runs.folder import WorkFolder

    target, head = Path(os.path.realpath(file)), _format(arguments, predictor).head
    size = max(1, PART // arguments.batch) * arguments.batch
    model = f"{identity(arguments.model, arguments.checkpoint)}{predictor.variant} {arguments.batch} {size}\n{head}"
    work = target.with_name(f".{target.name}.{_digest(model, paths)}.parts")
    if work.is_symlink():
        raise ValueError(f"{work} is a link, and predictions would be written through it; remove it")
    work.mkdir(exist_ok=True)
    refuse_links(work)
    with WorkFolder(work, target).locked():
        # remove parts of this target that belong to another model or other images, and to no running process
        name = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{12}\.parts")
        for path in target.parent.iterdir():
            if name.fullmatch(path.name) and path != work and path.is_dir() and not WorkFolder(path, target).busy:
                shutil.rmtree(path, ignore_errors=True)
        units = list(_parts(arguments, predictor, paths, work, size))
        if arguments.alone:
            _predict_here(arguments, predictor, units)
        elif failures := arguments.do_units(units, work, "parts"):
            label, reason = next(iter(failures.items()))
            last = reason.strip().splitlines()[-1]
            raise ValueError(f"{label}: {last}; the rest is kept, and the same command continues")
        unreadable = []
        with replacing(target) as temporary, temporary.open("wb") as stream:
            stream.write(head.encode("utf-8", "backslashreplace"))
            for unit in units:
                part = read_json(unit.result)
                stream.writelines(line.encode("utf-8", "backslashreplace") for line in part["lines"])
                unreadable += [Unreadable(Path(path), reason) for path, reason in part["unreadable"]]
        shutil.rmtree(work, ignore_errors=True)
    return unreadable


def _digest(model: str, paths: Sequence[Path]) -> str:
    """Twelve hex digits of everything that the lines depend on."""
    digest = hashlib.sha256(model.encode("utf-8", "surrogateescape"))
    for path in paths:
        try:
            size, time = path.stat().st_size, path.stat().st_mtime_ns
        except OSError:  # reported as unreadable when its turn comes
            size = time = -1
        # as typed too: that is how a line names its image
        digest.update(os.fsencode(f"{path}\0{os.path.abspath(path)}\0{size}\0{time}\0"))
    return digest.hexdigest()[:12]


def _parts(
    arguments: PredictArguments, predictor: "Predictor", paths: Sequence[Path], work: Path, size: int
) -> "Iterator[Unit]":
    from patchgen.sweep.jobs import Needs, Unit

    needs = Needs(arguments.threads, predictor.config.accelerator)
    options = {**asdict(arguments), "images": [], "runtime": arguments.resolved_runtime(predictor)}
    for number, start in enumerate(range(0, len(paths), size)):
        result, images = work / f"{number:06}.json", [str(path) for path in paths[start : start + size]]
        call = {"arguments": options, "images": images, "result": str(result)}
        yield Unit("patchgen.commands.predict:predict_part", call, work / f"{number:06}", result,
                   f"images {start + 1} to {start + len(images)}", needs, len(images))  # fmt: skip


def _predict_here(arguments: PredictArguments, predictor: "Predictor", units: "Sequence[Unit]") -> None:
    with Progress("predicting", sum(unit.size for unit in units)) as bar:
        if finished := sum(unit.size for unit in units if unit.folder.done):
            bar.advance(finished)
            bar.say("of an earlier attempt are reused")
        for unit in units:
            if not unit.folder.done:
                predict_part(unit.claim, **unit.arguments, predictor=predictor, tick=bar.tick)


def predict_part(
    folder: Path, arguments: dict[str, Any], images: list[str], result: str, predictor: "Predictor | None" = None,
    tick: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Write the lines of a part, and its unreadable images; a worker process loads its own predictor, once."""
    from patchgen.predict.predictor import Unreadable

    options = PredictArguments(**arguments)
    predictor = predictor or options.load_once()
    line = _format(options, predictor).line
    rows = list(predictor.predict(images, options.batch, tick))
    unreadable = [(str(row.path), row.reason) for row in rows if isinstance(row, Unreadable)]
    lines = [line(row) for row in rows if not isinstance(row, Unreadable)]
    write_text(result, json_text({"lines": lines, "unreadable": unreadable}))


COMMAND = predict

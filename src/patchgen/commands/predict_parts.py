"""The output file of `predict`, made in parts: a stopped command resumes, and processes can share the work.

A part is a number of whole batches, so that each image is predicted in the batch that one process would make. Parts
are in a hidden folder next to the target. Its name has a digest of the model, the format and the images, so that parts
of others are never used, and a file with the target's name is always complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.commands.predict import PredictArguments, line_format
from patchgen.common.files import refuse_links, replacing, write_text
from patchgen.common.untrusted import read_json

if TYPE_CHECKING:
    from patchgen.predict.predictor import Predictor, Unreadable
    from patchgen.sweep.jobs import Unit

IMAGES = 256  # approximate size of a part


def write_file(arguments: PredictArguments, file: str, predictor: Predictor, paths: Sequence[Path]) -> list[Unreadable]:
    """Predict the missing parts, write the file, and return the unreadable images.

    Raises:
        ValueError: another process writes the same, or a part failed; finished parts are kept.
    """
    from patchgen.predict.predictor import Unreadable, identity
    from patchgen.sweep.jobs import UnitFolder

    target, (head, _) = Path(os.path.realpath(file)), line_format(arguments, predictor)
    size = max(1, IMAGES // arguments.batch) * arguments.batch
    model = f"{identity(arguments.run, arguments.checkpoint)}{predictor.variant} {arguments.batch} {size}\n{head}"
    work = target.with_name(f".{target.name}.{_digest(model, paths)}.parts")
    if work.is_symlink():
        raise ValueError(f"{work} is a link, and predictions would be written through it; remove it")
    work.mkdir(exist_ok=True)
    refuse_links(work)
    with UnitFolder(work, target).locked():
        _remove_others(work, target)
        units = _units(arguments, predictor, paths, work, size)
        if arguments.alone:
            _predict_here(arguments, predictor, units)
        elif failures := arguments.do_units(units, work, "parts"):
            label, reason = next(iter(failures.items()))
            raise ValueError(
                f"{label}: {reason.strip().splitlines()[-1]}; the rest is kept, and the same command continues"
            )
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


def _remove_others(work: Path, target: Path) -> None:
    """Remove parts of this target that belong to another model or other images, and to no running process."""
    from patchgen.sweep.jobs import UnitFolder

    name = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{12}\.parts")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name) and path != work and path.is_dir() and not UnitFolder(path, target).busy:
            shutil.rmtree(path, ignore_errors=True)


def _units(
    arguments: PredictArguments, predictor: Predictor, paths: Sequence[Path], work: Path, size: int
) -> list[Unit]:
    from patchgen.sweep.jobs import Needs, Unit

    needs = Needs(arguments.threads, predictor.config.accelerator)
    options = {**asdict(arguments), "images": [], "runtime": arguments.resolved_runtime(predictor)}
    units = []
    for number, start in enumerate(range(0, len(paths), size)):
        result, images = work / f"{number:06}.json", [str(path) for path in paths[start : start + size]]
        call = {"arguments": options, "images": images, "result": str(result)}
        label = f"images {start + 1} to {start + len(images)}"
        units.append(Unit("patchgen.commands.predict_parts:predict_part", call, work / f"{number:06}", result, label,
                          needs, len(images)))  # fmt: skip
    return units


def _predict_here(arguments: PredictArguments, predictor: Predictor, units: Sequence[Unit]) -> None:
    from patchgen.common.progress import Progress

    with Progress("predicting", sum(unit.size for unit in units)) as bar:
        if finished := sum(unit.size for unit in units if unit.folder.done):
            bar.advance(finished)
            bar.say("of an earlier attempt are reused")
        for unit in units:
            if not unit.folder.done:
                _write_part(arguments, predictor, unit.arguments["images"], unit.result, bar.tick)


def predict_part(folder: Path, arguments: dict[str, Any], images: list[str], result: str) -> None:
    """One part, in a worker process."""
    options = PredictArguments(**arguments)
    _write_part(options, options.load_once(options.run), images, result)


def _write_part(
    arguments: PredictArguments, predictor: Predictor, images: Sequence[str], result: str | Path,
    tick: Callable[[int], None] = lambda count: None,
) -> None:  # fmt: skip
    """Write the lines of a part, and its unreadable images."""
    from patchgen.predict.predictor import Unreadable

    _, line = line_format(arguments, predictor)
    rows = list(predictor.predict([Path(image) for image in images], arguments.batch, tick))
    unreadable = [(str(row.path), row.reason) for row in rows if isinstance(row, Unreadable)]
    lines = [line(row) for row in rows if not isinstance(row, Unreadable)]
    write_text(result, json.dumps({"lines": lines, "unreadable": unreadable}))

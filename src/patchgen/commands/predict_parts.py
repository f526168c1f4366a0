"""`predict` shared among processes or machines: parts of the images, claimed on disk, put together in their order.

A part is a number of whole batches, so that each image is predicted in the batch that one process would make. The
parts are in a hidden folder next to the target, whose name carries a digest of the model and of the images; it is
removed when the target is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.commands.inputs import report_unreadable
from patchgen.commands.predict import PredictArguments, lines_of
from patchgen.common.files import replacing, write_text

if TYPE_CHECKING:
    from patchgen.predict.predictor import Predictor

IMAGES = 512  # approximate size of a part


def predict_parts(arguments: PredictArguments, predictor: Predictor, paths: Sequence[Path]) -> int:
    """Predict on the engine, write the file, and return the exit code.

    Raises:
        ValueError: no file to write to, or a part that failed; finished parts are kept.
    """
    from patchgen.commands.predict_lines import work_digest
    from patchgen.predict.predictor import Unreadable, identity
    from patchgen.sweep.unit import Needs, Unit

    file = arguments.csv or arguments.jsonl
    if file in (None, "-"):
        raise ValueError("--engine and --workers need a file to write to: add --csv FILE or --jsonl FILE")
    target, lines = Path(str(file)), lines_of(arguments, predictor)
    size = max(1, IMAGES // arguments.batch) * arguments.batch
    model = f"{identity(arguments.run, arguments.checkpoint)}{predictor.variant} {arguments.batch} {size}"
    work = target.absolute().with_name(f".{target.name}.{work_digest(model, lines.head, paths)}.parts")
    needs = Needs(arguments.threads, predictor.config.accelerator)
    given = {**asdict(arguments), "images": [], "runtime": arguments.resolved_runtime(predictor)}
    units = []
    for number, start in enumerate(range(0, len(paths), size)):
        result, images = work / f"{number:06}.json", [str(path) for path in paths[start : start + size]]
        call = {"arguments": given, "images": images, "result": str(result)}
        label = f"images {start + 1} to {start + len(images)}"
        units.append(Unit("patchgen.commands.predict_parts:predict_part", call, work / f"{number:06}", result, label,
                          needs, len(images)))  # fmt: skip
    failures = arguments.do_units(units, work, "parts")
    if failures:
        label, why = next(iter(failures.items()))
        raise ValueError(f"{label}: {why.strip().splitlines()[-1]}; the rest is kept, and the same command continues")
    failed = []
    with replacing(target) as temporary, temporary.open("wb") as stream:
        stream.write(lines.head.encode("utf-8", "backslashreplace"))
        for unit in units:
            part = json.loads(unit.result.read_text(encoding="utf-8"))
            stream.writelines(line.encode("utf-8", "backslashreplace") for line in part["lines"])
            failed += [Unreadable(Path(path), reason) for path, reason in part["unreadable"]]
    shutil.rmtree(work, ignore_errors=True)
    print(file)
    return report_unreadable(failed, len(paths), arguments.strict)


def predict_part(folder: Path, arguments: dict[str, Any], images: list[str], result: str) -> None:
    """Write the lines of one part, and its unreadable images."""
    from patchgen.predict.predictor import Unreadable

    given = PredictArguments(**arguments)
    predictor = given.load_once(given.run)
    line = lines_of(given, predictor).line
    found = list(predictor.predict([Path(image) for image in images], given.batch))
    unreadable = [(str(one.path), one.reason) for one in found if isinstance(one, Unreadable)]
    lines = [line(one) for one in found if not isinstance(one, Unreadable)]
    write_text(result, json.dumps({"lines": lines, "unreadable": unreadable}))

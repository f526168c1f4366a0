"""patchgen evaluate RUN RUN...: the mean of several runs' probabilities, scored on the domain that all left out."""

from __future__ import annotations

import json as to_json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.commands import announce, print_table
from patchgen.common.files import expanded

if TYPE_CHECKING:
    from patchgen.commands.evaluate import EvaluateArguments
    from patchgen.predict.fold_runs import Ensemble


def evaluate_runs(arguments: EvaluateArguments) -> int:
    """Score the ensemble next to its runs; returns the exit code."""
    out = _checked(arguments.out)
    announce()
    from patchgen.common.files import write_csv
    from patchgen.common.progress import Progress
    from patchgen.predict.fold_runs import open_members, score_members

    folders, fold = open_members((arguments.run, *arguments.targets), arguments.data)
    images = sum(map(len, fold.test.values())) * len(folders)
    with Progress(f"scoring {fold.unseen}", images) as bar:
        found = score_members(folders, fold, arguments.checkpoint, bar.tick, **arguments.device)
    if out:
        write_csv(out, _header(found), _lines(found), people=True)
    if arguments.json:
        print(to_json.dumps(_record(found, arguments.checkpoint), indent=2))
    else:
        _print(found)
        if out:
            print(out)
    return 0


def _checked(out: str | None) -> Path | None:
    """Check before any work what would otherwise fail at its end."""
    if out is None:
        return None
    file = expanded(out)
    if file.suffix.lower() != ".csv" or file.is_dir():
        raise ValueError(f"--out must name a .csv file, got '{out}'; try '{file / 'ensemble.csv'}'")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--out {file}: the folder {file.parent} does not exist; make it first")
    return file


def _record(found: Ensemble, checkpoint: str) -> dict[str, Any]:
    return {
        "unseen": found.fold.unseen,
        "checkpoint": checkpoint,
        "runs": [asdict(member) for member in found.members],
        "ensemble": {"part": found.part, "whole": found.whole},
        "gain": found.gain,
    }


def _print(found: Ensemble) -> None:
    members = [(f"{member.name} {member.run}", member.part, member.whole) for member in found.members]
    rows = [(name, _numbers(part, whole)) for name, part, whole in members]
    mean = tuple(sum(column) / len(rows) for column in zip(*(numbers for _, numbers in rows), strict=True))
    rows += [("mean of the runs", mean), ("ensemble", _numbers(found.part, found.whole))]
    header = (f"{found.fold.unseen} unseen", "accuracy, 80 % part", "accuracy, whole", "F1, whole")
    styles = [""] * len(members) + ["", "bold"]
    print_table(header, [(name, *(f"{number:.4f}" for number in numbers)) for name, numbers in rows], styles)
    print(f"{found.whole['images']} images; the ensemble is {100 * found.gain:+.2f} points from the mean of its runs")


def _numbers(part: dict[str, Any], whole: dict[str, Any]) -> tuple[float, ...]:
    return part["accuracy"], whole["accuracy"], whole["f1"]


def _header(found: Ensemble) -> list[str]:
    return ["path", "part", "truth", "label", "confidence", *(f"p_{name}" for name in found.fold.classes)]


def _lines(found: Ensemble) -> Iterator[list[str]]:
    """One line per image."""
    fold, inside = found.fold, set(found.fold.test["in"].tolist())
    for row, probability in zip(found.rows.tolist(), found.probabilities, strict=True):
        best = int(probability.argmax())
        about = [fold.table.paths[row], "in" if row in inside else "out", fold.table.label_name(row)]
        yield [*about, fold.classes[best], f"{probability[best]:.6f}", *(f"{p:.6f}" for p in probability)]

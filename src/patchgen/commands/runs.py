"""patchgen runs [FOLDER ...] | diff A B | clean ...: list run folders, compare two, clear some away."""

from __future__ import annotations

import json as to_json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import tyro

from patchgen.commands import parse, print_table

if TYPE_CHECKING:
    from patchgen.sweep.folders import Description

Folders = Annotated[tuple[str, ...], tyro.conf.Positional]


def list_runs(folders: Folders = ("runs",), json: bool = False) -> None:
    """List run folders, at any depth; `patchgen runs diff A B` compares two, `patchgen runs clean` clears some away.

    Args:
        folders: Where to look.
        json: Print JSON instead of a table.
    """
    from patchgen.sweep.folders import describe, find_runs

    found = [describe(run) for run in find_runs(folders)]
    if json:
        print(to_json.dumps([asdict(line) for line in found], indent=2))
    elif found:
        head = ("run", "state", "method", "data", "unseen", "seed", "accuracy %", "age", "size")
        print_table(head, [_cells(line) for line in found])
        for line in found:
            if line.error:
                print(f"{line.run}: {line.error}")
    else:
        print(f"no runs in {', '.join(folders)}")


def _cells(line: Description) -> list[str]:
    from patchgen.sweep.forecast import duration

    score = "" if line.accuracy is None else f"{100 * line.accuracy:.1f}"
    return [
        line.run, line.state, line.method, line.data, line.unseen, str(line.seed), score, duration(line.age),
        _size(line.size),
    ]  # fmt: skip


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def diff_runs(
    one: Annotated[str, tyro.conf.Positional], other: Annotated[str, tyro.conf.Positional], json: bool = False
) -> None:
    """Print the settings in which two runs differ.

    Args:
        one: A run folder.
        other: Another.
        json: Print JSON instead of a table.
    """
    from patchgen.sweep.folders import differences
    from patchgen.train.records import RunFolder

    found = differences(RunFolder.open(one), RunFolder.open(other))
    if json:
        print(to_json.dumps(found, indent=2))
    elif found:
        print_table(("setting", one, other), [(name, str(a), str(b)) for name, (a, b) in found.items()])
    else:
        print("the same settings")


def clean_runs(
    folders: Folders = ("runs",),
    failed: bool = False,
    unfinished: bool = False,
    keep_checkpoints: tuple[str, ...] | None = None,
    yes: bool = False,
) -> None:
    """Remove failed or unfinished runs, or checkpoints of finished ones; only says what it would do without --yes.

    Args:
        folders: Where to look.
        failed: Runs whose last attempt failed.
        unfinished: Runs that were stopped on their way. One that a process is training is never touched.
        keep_checkpoints: Of finished runs, remove all checkpoints but these, such as `selected`; records stay.
        yes: Do it.
    """
    from patchgen.sweep.folders import bytes_of, find_runs, remove, to_clean

    if not (failed or unfinished or keep_checkpoints is not None):
        raise ValueError("say what to remove: --failed, --unfinished, or --keep-checkpoints selected")
    found = to_clean(find_runs(folders), failed=failed, unfinished=unfinished, keep_checkpoints=keep_checkpoints)
    total = 0
    for path in found:
        size = bytes_of(path)
        gone = remove(path) if yes else False
        word = "removed" if gone else "is being trained now, kept" if yes else "would be removed"
        total += size if gone or not yes else 0
        print(f"{path}: {word} ({_size(size)})")
    print(f"{_size(total)} in all" + ("" if yes or not found else "; the same command with --yes does it"))


ACTIONS: dict[str, Callable[..., None]] = {"diff": diff_runs, "clean": clean_runs}


def main(argv: list[str]) -> int:
    action = ACTIONS.get(argv[0]) if argv else None
    name = f"runs {argv[0]}" if action else "runs"
    parse(action or list_runs, name, argv[1:] if action else argv)
    return 0

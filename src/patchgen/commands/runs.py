"""patchgen runs [FOLDER ...] | diff A B | clean ... | collect ... | table FILE: list, compare, clean, tabulate."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from patchgen.commands import print_table
from patchgen.common.text import did_you_mean, duration, json_text

Folders = Annotated[tuple[str, ...], tyro.conf.Positional]


def list_runs(folders: Folders = ("runs",), json: bool = False) -> None:
    """List run folders, at any depth; `patchgen runs diff A B` compares two, `patchgen runs clean` deletes some.

    Args:
        folders: Where to look.
        json: Print JSON instead of a table.
    """
    from patchgen.runs.find import describe, find_runs

    runs = [describe(run) for run in find_runs(folders)]
    if json:
        print(json_text([asdict(run) for run in runs]))
    elif runs:
        head = ("run", "state", "method", "data", "unseen", "seed", "accuracy %", "age", "size")
        rows = [
            (run.run, run.state, run.method, run.data, run.unseen, str(run.seed),
             "" if run.accuracy is None else f"{100 * run.accuracy:.1f}", duration(run.age), _size(run.size))
            for run in runs
        ]  # fmt: skip
        print_table(head, rows)
        print(*(f"{run.run}: {run.error}\n" for run in runs if run.error), sep="", end="")
    else:
        print(f"no runs in {', '.join(folders)}")


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
    from patchgen.runs.find import differences
    from patchgen.runs.folder import RunFolder

    settings = differences(RunFolder.open(one), RunFolder.open(other))
    if json:
        print(json_text(settings))
    elif settings:
        print_table(("setting", one, other), [(name, str(a), str(b)) for name, (a, b) in settings.items()])
    else:
        print("the same settings")


def clean_runs(
    folders: Folders = ("runs",),
    failed: bool = False,
    unfinished: bool = False,
    keep_checkpoints: tuple[str, ...] | None = None,
    yes: bool = False,
) -> None:
    """Delete failed or unfinished runs, or checkpoints of finished ones; without --yes only list them.

    Args:
        folders: Where to look.
        failed: Runs whose last attempt failed.
        unfinished: Interrupted runs. A run that is being trained is never touched.
        keep_checkpoints: Of finished runs, remove all checkpoints but these, such as `selected`; records stay.
        yes: Delete; without it this is a dry run.
    """
    from patchgen.runs.find import bytes_of, find_runs, remove, to_clean

    if not (failed or unfinished or keep_checkpoints is not None):
        raise ValueError("say what to remove: --failed, --unfinished, or --keep-checkpoints selected")
    paths = to_clean(find_runs(folders), failed, unfinished, keep_checkpoints)
    total = 0
    for path in paths:
        size = bytes_of(path)
        gone = remove(path) if yes else False
        word = "removed" if gone else "in use, kept" if yes else "would be removed"
        total += size if gone or not yes else 0
        print(f"{path}: {word} ({_size(size)})")
    print(f"{_size(total)} in all" + ("" if yes or not paths else "; the same command with --yes does it"))


def collect_runs(folders: Folders = ("runs",), csv: str = "results.csv") -> None:
    """Add the finished runs below folders to a CSV file, one row per run, so that the folders can be deleted.

    Args:
        folders: Where to look.
        csv: The file; rows of the same run are replaced, all others stay.
    """
    from patchgen.report.results import collect

    new, total = collect([Path(folder) for folder in folders], Path(csv))
    print(f"{csv}: {new} new, {total} rows")


def tabulate_runs(
    file: Annotated[str, tyro.conf.Positional],
    scores: tuple[str, ...] = ("accuracy",),
    only: dict[str, str] = {},  # noqa: B006
    against: tuple[str, ...] = (),
) -> None:
    """Print Markdown tables of finished runs: mean and standard error over seeds.

    There is one table per score; scores of a single fold share one.

    Args:
        file: A folder of runs, or the CSV file that `patchgen runs collect` wrote.
        scores: Columns to show: accuracy, swad, validation, auroc, iou, kept, iou_before, true_mask, random_mask.
        only: Rows to show, such as `data PACS`, or several values separated by commas: `data oracle-easy,oracle-full`.
        against: Methods whose paired differences are added.
    """
    from patchgen.report.results import COLUMNS, SCORES, read_rows, tables

    for names, known in ((scores, SCORES), (only, COLUMNS)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"the file has no column {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    rows = [row for row in read_rows(Path(file)) if all(row[k] in v.split(",") for k, v in only.items())]
    if not rows:
        raise ValueError(f"{file} has no rows with {', '.join(f'{k} {v}' for k, v in only.items()) or 'anything'}")
    print(tables(rows, scores, against))


COMMAND: dict[str, Callable[..., None]] = {
    "list": list_runs, "diff": diff_runs, "clean": clean_runs, "collect": collect_runs, "table": tabulate_runs
}  # fmt: skip
DEFAULT = "list"

"""Manage run folders: find them, describe them, compare two, clean up."""

import dataclasses
import os
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patchgen.common.files import temporary_name
from patchgen.common.untrusted import read_json
from patchgen.runs.folder import UNREADABLE, RunBusy, RunFolder, WorkFolder, run_folders
from patchgen.runs.scores import headline

State = Literal["waiting", "unfinished", "running", "done", "failed"]
FAILED = "failed.json"


@dataclass(frozen=True)
class Failure:
    """The content of `failed.json`."""

    attempts: int
    error: str
    time: str
    final: bool  # another attempt would fail the same way: wrong settings, wrong data, diverged

    @property
    def line(self) -> str:
        """The last line of the error, which names it."""
        return (self.error.strip().splitlines() or ["unknown error"])[-1]


def state_of(run: WorkFolder) -> State:
    """The state of a run; a held lock takes precedence over an old failure."""
    if run.done:
        return "done"
    if run.busy:
        return "running"
    if (run.path / FAILED).exists():
        return "failed"
    return "unfinished" if (run.path / "config.yaml").exists() else "waiting"


def failure_of(run: WorkFolder) -> Failure | None:
    """The stored error of a run, if any."""
    try:
        facts = read_json(run.path / FAILED)
        return Failure(int(facts["attempts"]), str(facts["error"]), str(facts["time"]), bool(facts["final"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        return Failure(1, f"{FAILED} is damaged ({type(error).__name__}: {error!s:.200}); remove it", "", False)


@dataclass(frozen=True)
class Description:
    """A line of `patchgen runs`."""

    run: str
    state: State
    method: str
    data: str
    unseen: str  # empty where a stream has none
    seed: int
    accuracy: float | None  # of the selected checkpoint on the whole unseen domain; of a stream: All, mean of stages
    age: float  # seconds since something was last written
    size: int  # bytes
    error: str | None


def find_runs(folders: Sequence[str | Path]) -> list[RunFolder]:
    """All run folders at or below some folders, oldest first."""
    paths = [path for path in run_folders(folders) if os.path.lexists(path / "config.yaml")]
    return [RunFolder(path) for path in sorted(paths, key=lambda path: os.lstat(path / "config.yaml").st_mtime)]


def describe(run: RunFolder) -> Description:
    """A summary of a run; a run that cannot be read is described as such."""
    stats = _file_stats(run.path)
    age = time.time() - max((each.st_mtime for each in stats), default=0.0)
    size = sum(each.st_size for each in stats)
    try:
        run.refuse_links()
        failure, config, accuracy, state = failure_of(run), run.settings, headline(run), state_of(run)
    except UNREADABLE as error:  # a damaged folder must not hide the others
        text = str(error) if isinstance(error, ValueError) else f"it cannot be read ({type(error).__name__}: {error})"
        state = "done" if run.done else "unfinished"
        return Description(str(run.path), state, "?", "?", "", 0, None, age, size, text[:500])
    why = failure.line if failure and state == "failed" else None
    return Description(str(run.path), state, config.method, Path(config.data).name, getattr(config, "unseen", ""),
                       config.seed, accuracy, age, size, why)  # fmt: skip


def _file_stats(path: Path) -> list[os.stat_result]:
    """Of the files that currently exist; a running training may remove some."""
    stats = []
    for file in path.rglob("*"):
        with suppress(OSError):
            stats.append(file.stat())
    return [each for each in stats if stat.S_ISREG(each.st_mode)]


def differences(one: RunFolder, other: RunFolder) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ; a setting that a run does not have is None."""
    a, b = (dataclasses.asdict(run.settings) for run in (one, other))
    return {name: (a.get(name), b.get(name)) for name in a | b if a.get(name) != b.get(name)}


def to_clean(
    runs: Iterable[RunFolder], failed: bool, unfinished: bool, keep_checkpoints: Sequence[str] | None
) -> list[Path]:
    """Failed or unfinished runs, and of finished ones all checkpoints but `keep_checkpoints`; None: no checkpoint."""
    paths: list[Path] = []
    for run in runs:
        state = state_of(run)
        if (failed and state == "failed") or (unfinished and state == "unfinished"):
            paths.append(run.path)
        elif state == "done" and keep_checkpoints is not None:
            files = sorted((run.path / "checkpoints").glob("*.safetensors"))
            paths += [file for file in files if file.stem not in keep_checkpoints]
    return paths


def remove(path: Path) -> bool:
    """Remove a run folder or a checkpoint of a finished run; False if a process has started to train it meanwhile."""
    if path.is_file():
        path.unlink()
        return True
    aside = temporary_name(path)  # leftovers after a kill are removed by the next write to that folder
    try:
        with RunFolder(path).locked():
            os.replace(path, aside)  # no other process can see half of a run
    except RunBusy:
        return False
    shutil.rmtree(aside)
    return True


def bytes_of(path: Path) -> int:
    """Size of a file, or of all files of a folder."""
    return path.stat().st_size if path.is_file() else sum(each.st_size for each in _file_stats(path))

"""A unit of work other than a training: one call of a function of this package, claimed on disk like a run.

    unit = Unit("patchgen.commands.slide:map_slide", {"slide": "a.svs"}, out / ".work" / "a", out / "a", "a.svs")
    failed = run_units([unit], "ray", LauncherOptions(out / ".work"))

The function is called with the arguments and with `folder`, the claim's own folder, for partial results. It writes the
result under another name and renames it: a unit is done when its result exists, and its claim is then removed. A killed
process leaves its claim behind, and the next attempt takes it over.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.common.machine import use_threads
from patchgen.runs.find import FAILED, Failure, failure_of
from patchgen.runs.folder import WorkFolder
from patchgen.sweep.jobs import Outcome, Work, perform
from patchgen.sweep.launch import Launcher, Watch, launch
from patchgen.sweep.local import LOG

if TYPE_CHECKING:
    from patchgen.sweep.engines import LauncherOptions

PACKAGE = "patchgen."  # a call comes from another process: only this package may be imported for it


@dataclass(frozen=True)
class Needs:
    """The resources that a unit needs, named as in a run's settings."""

    threads: int | None = None
    accelerator: str = "auto"


class UnitFolder(WorkFolder):
    verb = "worked on"

    def __init__(self, path: Path, result: Path) -> None:
        super().__init__(path)
        self.result = result

    @property
    def done(self) -> bool:
        return self.result.exists()


@dataclass(frozen=True)
class Unit:
    call: str  # module:function
    arguments: dict[str, Any]  # as JSON has them
    claim: Path
    result: Path  # file or folder
    label: str
    config: Needs = field(default_factory=Needs)
    size: int = 1

    def __str__(self) -> str:
        return self.label

    @property
    def run(self) -> str:
        return str(self.claim)

    @property
    def folder(self) -> UnitFolder:
        return UnitFolder(self.claim, self.result)

    @property
    def progress(self) -> int:
        return self.size if self.folder.done else 0

    def begin(self) -> None:
        self.claim.mkdir(parents=True, exist_ok=True)

    def do(self) -> None:
        self.begin()
        with self.folder.locked():
            if not self.folder.done:  # done by another process before we got the lock
                module, _, name = self.call.partition(":")
                if not module.startswith(PACKAGE):
                    raise ValueError(f"{self.call!r} is no function of {PACKAGE[:-1]}")
                use_threads(self.config.threads)
                getattr(import_module(module), name)(folder=self.claim, **self.arguments)
            shutil.rmtree(self.claim, ignore_errors=True)

    def to_json(self) -> str:
        paths = {"claim": str(self.claim.resolve()), "result": str(self.result.resolve())}
        return json.dumps({**dataclasses.asdict(self), **paths})

    @classmethod
    def from_json(cls, text: str) -> Unit:
        values: dict[str, Any] = json.loads(text)
        values |= {name: Path(values[name]) for name in ("claim", "result")}
        return cls(**{**values, "config": Needs(**values["config"])})


class InProcess:
    """The engine of this process: runs units sequentially."""

    slots = 1

    def submit(self, jobs: Sequence[Work]) -> list[Outcome]:
        return [perform(job) for job in jobs]

    def finished(self, handles: Sequence[Outcome], seconds: float) -> list[Outcome]:
        return list(handles)

    def outcome(self, handle: Outcome) -> Outcome:
        return handle

    def close(self) -> None:
        """Nothing is left running."""


def run_units(
    units: Sequence[Unit], engine: str | None, options: LauncherOptions, what: str = "slides", quiet: bool = False
) -> dict[str, Failure]:
    """Run the unfinished units, on an engine or (None) in this process; returns remaining failures by label.

    Failures of an earlier command are reset: their cause may have been fixed.
    """
    from patchgen.sweep.engines import LAUNCHERS

    for unit in units:
        if not unit.folder.busy:
            (unit.claim / FAILED).unlink(missing_ok=True)
    if todo := [unit for unit in units if not unit.folder.done]:
        options.out.mkdir(parents=True, exist_ok=True)
        launcher: Launcher = LAUNCHERS[engine](options, todo) if engine else InProcess()
        launch(units, launcher, retries=options.retries, watch=Watch(units, quiet, title=what, what=what))
    failures = {unit.label: failure_of(unit.folder) for unit in units if not unit.folder.done}
    if not any(failures.values()):
        for parent in {unit.claim.parent for unit in units}:
            with suppress(OSError):  # still needed
                (parent / LOG).unlink(missing_ok=True)
                parent.rmdir()
    return {label: failure for label, failure in failures.items() if failure}

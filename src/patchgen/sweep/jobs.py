"""Work that is claimed on disk: a `Job` is one run of a sweep, a `Unit` one call of a function of this package."""

import dataclasses
import json
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from patchgen.common.machine import use_threads
from patchgen.config import Settings, config_class
from patchgen.runs.find import FAILED, Failure, State, failure_of, state_of
from patchgen.runs.folder import ProcessDied, RunBusy, RunFolder, WorkFolder

Outcome = Literal["done", "found", "busy", "failed"]  # found: done by another process; busy: locked by one
Kind = Literal["train", "no-op"]
PACKAGE = "patchgen."  # a call comes from another process: only this package may be imported for it


@dataclass(frozen=True)
class Job:
    labels: tuple[str, ...]  # its names in the recipes
    rows: tuple[str, ...]
    config: Settings
    out: Path
    run: str  # the hash that names its folder
    size: int  # steps; of a stream: epochs of all stages
    kind: Kind = "train"
    track: str | bool = field(default=False, compare=False)
    quiet: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return "; ".join(self.labels)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.out / self.run)

    @property
    def state(self) -> State:
        return state_of(self.folder)

    @property
    def progress(self) -> int:
        """Completed steps (epochs) of `size`; 0 if the records are damaged, which training will report."""
        if self.folder.done:
            return self.size
        try:
            records = self.folder.records()
        except ValueError:
            return 0
        epochs = sum(record["kind"] == "epoch" for record in records)
        return min(self.size, epochs or max((record.get("step", -1) + 1 for record in records), default=0))

    def begin(self) -> None:
        """Create the folder."""
        with suppress(ValueError):  # the folder of another run, already reported by `perform`
            RunFolder.create(self.out, self.config, self.run)

    def do(self) -> None:
        WORK[self.kind](self)


def _train(job: Job) -> None:
    from patchgen.train.lifecycle import train

    train(job.config, job.out, quiet=job.quiet, track=job.track)


def _no_op(job: Job) -> None:
    """The bookkeeping of a run without its work, timed by `python -m benchmarks sweep`."""
    run = RunFolder.create(job.out, job.config, job.run)
    with run.locked():
        if not run.done:
            run.append({"kind": "evaluation", "step": 0, "seconds": 0.0})
            run.finish("nothing was trained\n")


WORK: dict[Kind, Callable[[Job], None]] = {"train": _train, "no-op": _no_op}


@dataclass(frozen=True)
class Needs:
    """The resources that a unit needs, named as in a run's settings."""

    threads: int | None = None
    accelerator: str = "auto"


@dataclass(frozen=True)
class Unit:
    """A call of a function of this package, done when its result exists, which it writes elsewhere and renames."""

    call: str  # module:function
    arguments: dict[str, Any]  # as JSON has them
    claim: Path  # for partial results, passed as `folder`; after a kill the next attempt takes it over
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
    def folder(self) -> WorkFolder:
        return WorkFolder(self.claim, self.result)

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


Work = Job | Unit


def to_json(work: Work) -> str:
    """One line for another process."""
    return json.dumps(dataclasses.asdict(work), default=lambda path: str(path.resolve()))


def read_work(text: str) -> Work:
    """The inverse of `to_json`."""
    values: dict[str, Any] = json.loads(text)
    values |= {name: Path(values[name]) for name in ("claim", "result", "out") if name in values}
    if "call" in values:
        return Unit(**values | {"config": Needs(**values["config"])})
    values |= {name: tuple(values[name]) for name in ("labels", "rows")}
    return Job(**values | {"config": config_class(values["config"]["task"])(**values["config"])})


def can_retry(job: Work, retries: int) -> bool:
    """False if a run has used up its attempts, or would fail again."""
    failure = failure_of(job.folder)
    return failure is None or (not failure.final and failure.attempts <= retries)


def perform(job: Work) -> Outcome:
    """Train one run (or do one unit of other work) to completion; errors are stored in its folder."""
    if job.folder.done:
        return "found"
    try:
        job.do()
    except RunBusy:
        return "busy"
    except Exception as error:  # the sweep continues with the other runs
        text = str(error) if isinstance(error, (ValueError, OSError)) else traceback.format_exc()
        note_failure(job, text, final=isinstance(error, ValueError) and not isinstance(error, ProcessDied))
        return "failed"
    return "done"


def note_failure(job: Work, error: str, final: bool = False) -> None:
    """Record a failed attempt and its error."""
    before = failure_of(job.folder)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    failure = Failure((before.attempts if before else 0) + 1, error or "unknown error", now, final)
    job.begin()
    job.folder.write_json(FAILED, dataclasses.asdict(failure))

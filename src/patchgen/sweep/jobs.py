"""A job: one run of a sweep. What has become of it stands in its run folder and nowhere else.

    job.state                          # waiting | unfinished | running | done | failed
    perform(job)                       # train it, here and now; an error is kept in RUN/failed.json

So a sweep may be stopped, extended, moved to another place and gone on with, by one launcher or by several.
"""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from patchgen.config import Config, Settings, config_class
from patchgen.runs.claim import Claim, RunBusy
from patchgen.runs.find import FAILED, Failure, State, failure_of, state_of
from patchgen.runs.folder import ProcessDied, RunFolder

Outcome = Literal["done", "found", "busy", "failed"]  # found: somebody else had done it; busy: is doing it
Kind = Literal["train", "no-op"]


class Work:
    """What launchers, engines and workers know of a piece of work: a training (`Job`), or a call (`unit.Unit`)."""

    run: str  # names it among the others
    size: int  # how much there is to do
    config: Any  # has `threads` and `accelerator`, and `devices` where several share the work

    @property
    def folder(self) -> Claim:
        """Its lock, its last failure, and whether it is done."""
        raise NotImplementedError

    @property
    def progress(self) -> int:
        """How much of `size` is done."""
        raise NotImplementedError

    def begin(self) -> None:
        """Make its folder."""
        raise NotImplementedError

    def do(self) -> None:
        """All of it, here and now."""
        raise NotImplementedError

    def to_json(self) -> str:
        """One line, for another process; `read_work` reads it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Job(Work):
    labels: tuple[str, ...]  # what its recipes call it
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
        """Steps (epochs) that are done, of `size`; 0 where the records are damaged, which training will tell."""
        if self.folder.done:
            return self.size
        try:
            records = self.folder.records()
        except ValueError:
            return 0
        epochs = sum(record["kind"] == "epoch" for record in records)
        return min(self.size, epochs or max((record.get("step", -1) + 1 for record in records), default=0))

    def begin(self) -> None:
        with suppress(ValueError):  # the folder of another run: `perform` has said so already
            RunFolder.create(self.out, self.config, self.run)

    def do(self) -> None:
        WORK[self.kind](self)

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "out": str(self.out.resolve())})

    @classmethod
    def from_json(cls, text: str) -> Job:
        found: dict[str, Any] = json.loads(text)
        config, out = config_class(found["config"]["task"])(**found.pop("config")), Path(found.pop("out"))
        return cls(tuple(found.pop("labels")), tuple(found.pop("rows")), config, out, **found)


def read_work(text: str) -> Work:
    """What `to_json` wrote."""
    from patchgen.sweep.unit import Unit

    return Unit.from_json(text) if "call" in json.loads(text) else Job.from_json(text)


def worth_another(job: Work, retries: int) -> bool:
    """False where a run has used up its attempts, or would fail again as it did."""
    failure = failure_of(job.folder)
    return failure is None or (not failure.final and failure.attempts <= retries)


def perform(job: Work) -> Outcome:
    """Train one run (or do one unit of other work) to its end; what goes wrong is kept in its folder."""
    if job.folder.done:
        return "found"
    try:
        job.do()
    except RunBusy:
        return "busy"
    except Exception as error:  # whatever it is, the sweep goes on with the other runs
        plain = isinstance(error, (ValueError, OSError))
        text = str(error) if plain else traceback.format_exc()
        note_failure(job, text, final=isinstance(error, ValueError) and not isinstance(error, ProcessDied))
        return "failed"
    return "done"


def note_failure(job: Work, error: str, final: bool = False) -> Failure:
    """Count an attempt that failed, and keep its error."""
    before = failure_of(job.folder)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    failure = Failure((before.attempts if before else 0) + 1, error or "unknown error", now, final)
    job.begin()
    job.folder.write_json(FAILED, dataclasses.asdict(failure))
    return failure


def _train(job: Job) -> None:
    from patchgen.data.shared import shared_table
    from patchgen.train.lifecycle import train

    config = job.config
    table = shared_table(config.data, config.benchmark, config.options) if isinstance(config, Config) else None
    train(config, job.out, table, quiet=job.quiet, track=job.track)


def _no_op(job: Job) -> None:
    """All of a run's bookkeeping and none of its work: what `python -m benchmarks sweep` times."""
    run = RunFolder.create(job.out, job.config, job.run)
    with run.locked():
        if not run.done:
            run.append({"kind": "evaluation", "step": 0, "seconds": 0.0})
            run.finish("nothing was trained\n")


WORK: dict[Kind, Callable[[Job], None]] = {"train": _train, "no-op": _no_op}

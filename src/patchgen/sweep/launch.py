"""The launcher: hand out the jobs that are not done, look at what came of them, try again where that may help.

    launch(jobs, engine, retries=2, watch=Watch(jobs))

It keeps nothing that is not in the run folders, so it may be killed and started again, and several may work on one
folder: a run whose lock is held is somebody else's; it is put aside and looked at again at the end.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

from patchgen.common.progress import Progress
from patchgen.runs.find import failure_of
from patchgen.sweep.jobs import Outcome, Work, note_failure, worth_another

TICK = 1.0  # seconds between two looks at the records of what is running


class WorkerLost(Exception):
    """The process or machine that did a job ended without an answer."""


class EngineLost(ValueError):
    """The engine itself is gone: no run is to blame, and none can be done any more."""


class Engine(Protocol):
    """Where jobs are done."""

    slots: int  # jobs that it takes at once

    def submit(self, jobs: Sequence[Work]) -> list[Any]:
        """Begin jobs; a handle for each."""

    def finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        """The handles that have ended, after at most so many seconds."""

    def outcome(self, handle: Any) -> Outcome:
        """What came of a job that has ended; WorkerLost where nobody can say, EngineLost where nobody is left."""

    def close(self) -> None:
        """End everything that still goes on."""


class Watch:
    """What a person sees of a sweep: steps done in all runs, time left, a line for each run that ends."""

    def __init__(self, jobs: Sequence[Work], quiet: bool = False, title: str = "sweep", what: str = "runs") -> None:
        self.jobs, self.what = jobs, what
        self.ended = sum(job.folder.done for job in jobs)
        self.seen = {job.run: job.progress for job in jobs}
        self.bar = Progress(title, sum(job.size - self.seen[job.run] for job in jobs), quiet=quiet)
        self.looked = time.monotonic()

    def look(self, active: Sequence[Work]) -> None:
        """Count the steps that the active runs have recorded since the last look."""
        if time.monotonic() - self.looked >= TICK:
            for job in active:
                self._count(job, job.progress)
            self.looked = time.monotonic()

    def end(self, job: Work, word: str) -> None:
        self.ended += 1
        self._count(job, job.size)
        self.bar.say(f"{self.ended} of {len(self.jobs)} {self.what}: {job}: {word}")

    def _count(self, job: Work, progress: int) -> None:
        # a run that went on from a checkpoint may fall back; the bar waits for it
        self.bar.advance(max(0, progress - self.seen[job.run]))
        self.seen[job.run] = max(progress, self.seen[job.run])


def launch(jobs: Sequence[Work], engine: Engine, *, retries: int, watch: Watch) -> Counter[str]:
    """Do what is not done; returns how many runs were done here, found done, and failed for good."""
    counts: Counter[str] = Counter()
    todo, aside = deque(job for job in jobs if not job.folder.done and worth_another(job, retries)), deque[Work]()
    active: list[tuple[Any, Work]] = []
    try:
        with watch.bar:
            while todo or active or aside:
                if not todo and aside:
                    todo, aside = aside, deque()
                active += _hand_out(todo, aside, engine, len(active), counts, watch)
                if not active and not todo:  # only others are at work
                    time.sleep(TICK)
                ended = engine.finished([handle for handle, _ in active], TICK) if active else []
                for handle, job in [pair for pair in active if pair[0] in ended]:
                    active.remove((handle, job))
                    _take_in(_outcome(engine, handle, job), job, todo, aside, retries, counts, watch)
                watch.look([job for _, job in active])
    finally:
        engine.close()
    return counts


def _hand_out(
    todo: deque[Work], aside: deque[Work], engine: Engine, active: int, counts: Counter[str], watch: Watch
) -> list[tuple[Any, Work]]:
    """Begin as many of the waiting jobs as there is room for; what others do or have done is not begun."""
    ready: list[Work] = []
    while todo and active + len(ready) < engine.slots:
        job = todo.popleft()
        if job.folder.done:
            counts["found"] += 1
            watch.end(job, "done by another launcher")
        elif job.folder.busy:
            aside.append(job)
        else:
            ready.append(job)
    return list(zip(engine.submit(ready), ready, strict=True)) if ready else []


def _outcome(engine: Engine, handle: Any, job: Work) -> Outcome:
    try:
        return engine.outcome(handle)
    except WorkerLost as error:
        if job.folder.done:
            return "done"  # it was lost after the last of its work
        note_failure(job, str(error))
        return "failed"


def _take_in(
    outcome: Outcome, job: Work, todo: deque[Work], aside: deque[Work], retries: int, counts: Counter[str], watch: Watch
) -> None:
    if outcome == "busy":
        aside.append(job)
    elif outcome == "failed" and worth_another(job, retries):
        watch.bar.say(f"{job}: failed, is tried again ({_why(job)})")
        todo.append(job)
    else:
        counts[outcome] += 1
        words = {"done": "done", "found": "done by another launcher", "failed": f"FAILED ({_why(job)})"}
        watch.end(job, words[outcome])


def _why(job: Work) -> str:
    failure = failure_of(job.folder)
    return failure.line if failure else "unknown error"

"""The launcher: distribute the unfinished jobs, collect their outcomes, and retry if that may help.

    launch(jobs, engine, retries=2, watch=Watch(jobs))

It has no state outside the run folders, so it can be killed and restarted, and several launchers can work on one
folder: a run whose lock is held by another process is skipped and checked again at the end.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

from patchgen.common.progress import Progress
from patchgen.runs.find import failure_of
from patchgen.sweep.jobs import Outcome, Work, can_retry, note_failure

TICK = 1.0  # seconds between two checks of the records of active runs


class WorkerLost(Exception):
    """The process or machine of a job ended without an answer."""


class LauncherLost(ValueError):
    """The engine itself has failed: not the fault of a run, and no run can continue."""


class Launcher(Protocol):
    """Executes jobs."""

    slots: int  # jobs that it accepts at once

    def submit(self, jobs: Sequence[Work]) -> list[Any]:
        """Start jobs; returns a handle for each."""

    def finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        """The handles that have ended, after at most this many seconds."""

    def outcome(self, handle: Any) -> Outcome:
        """The outcome of a job that has ended; raises WorkerLost if it is unknown, LauncherLost if the engine died."""

    def close(self) -> None:
        """Stop everything that is still running."""


class Watch:
    """Displays the progress of a sweep: completed steps, remaining time, a line for each run that ends."""

    def __init__(self, jobs: Sequence[Work], quiet: bool = False, title: str = "sweep", what: str = "runs") -> None:
        self.jobs, self.what = jobs, what
        self.ended = sum(job.folder.done for job in jobs)
        self.seen = {job.run: job.progress for job in jobs}
        self.bar = Progress(title, sum(job.size - self.seen[job.run] for job in jobs), quiet=quiet)
        self.looked = time.monotonic()

    def look(self, active: Sequence[Work]) -> None:
        """Count the steps that the active runs have recorded since the last call."""
        if time.monotonic() - self.looked >= TICK:
            for job in active:
                self._count(job, job.progress)
            self.looked = time.monotonic()

    def end(self, job: Work, word: str) -> None:
        self.ended += 1
        self._count(job, job.size)
        self.bar.say(f"{self.ended} of {len(self.jobs)} {self.what}: {job}: {word}")

    def _count(self, job: Work, progress: int) -> None:
        # a resumed run may fall back to its checkpoint; the bar waits for it
        self.bar.advance(max(0, progress - self.seen[job.run]))
        self.seen[job.run] = max(progress, self.seen[job.run])


def launch(jobs: Sequence[Work], engine: Launcher, *, retries: int, watch: Watch) -> Counter[str]:
    """Run the unfinished jobs; returns how many runs were done here, found done, and failed for good."""
    counts: Counter[str] = Counter()
    todo, aside = deque(job for job in jobs if not job.folder.done and can_retry(job, retries)), deque[Work]()
    active: list[tuple[Any, Work]] = []
    try:
        with watch.bar:
            while todo or active or aside:
                if not todo and aside:
                    todo, aside = aside, deque()
                active += _hand_out(todo, aside, engine, len(active), counts, watch)
                if not active and not todo:  # only other launchers are working
                    time.sleep(TICK)
                ended = engine.finished([handle for handle, _ in active], TICK) if active else []
                for handle, job in [pair for pair in active if pair[0] in ended]:
                    active.remove((handle, job))
                    _handle_outcome(_outcome(engine, handle, job), job, todo, aside, retries, counts, watch)
                watch.look([job for _, job in active])
    finally:
        engine.close()
    return counts


def _hand_out(
    todo: deque[Work], aside: deque[Work], engine: Launcher, active: int, counts: Counter[str], watch: Watch
) -> list[tuple[Any, Work]]:
    """Start as many waiting jobs as there are free slots; skips jobs that others are doing or have done."""
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


def _outcome(engine: Launcher, handle: Any, job: Work) -> Outcome:
    try:
        return engine.outcome(handle)
    except WorkerLost as error:
        if job.folder.done:
            return "done"  # the worker was lost after finishing
        note_failure(job, str(error))
        return "failed"


def _handle_outcome(
    outcome: Outcome, job: Work, todo: deque[Work], aside: deque[Work], retries: int, counts: Counter[str], watch: Watch
) -> None:
    if outcome == "busy":
        aside.append(job)
    elif outcome == "failed" and can_retry(job, retries):
        watch.bar.say(f"{job}: failed, retrying ({_why(job)})")
        todo.append(job)
    else:
        counts[outcome] += 1
        words = {"done": "done", "found": "done by another launcher", "failed": f"FAILED ({_why(job)})"}
        watch.end(job, words[outcome])


def _why(job: Work) -> str:
    failure = failure_of(job.folder)
    return failure.line if failure else "unknown error"

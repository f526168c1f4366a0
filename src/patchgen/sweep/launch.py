"""The launcher: distribute the unfinished jobs, collect their outcomes, and retry if that may help.

All state is in the run folders: several launchers can work on one folder, each can be killed and restarted.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from patchgen.common.progress import Progress
from patchgen.runs.find import FAILED, Failure, failure_of
from patchgen.sweep.jobs import Outcome, Unit, Work, can_retry, note_failure, perform

TICK = 1.0  # seconds between two checks of the records of active runs
LOG = "sweep.log"  # in the sweep's folder: the output of local workers


class WorkerLost(Exception):
    """The process or machine of a job ended without an answer."""


class LauncherLost(ValueError):
    """The engine itself has failed: not the fault of a run, and no run can continue."""


class Launcher(Protocol):
    slots: int  # jobs that it accepts at once
    pause: float  # seconds between two looks at its jobs

    def submit(self, jobs: Sequence[Work]) -> list[Any]: ...  # starts them; a handle with `done()` for each
    def outcome(self, handle: Any) -> Outcome: ...  # WorkerLost if it is unknown, LauncherLost if the engine died
    def close(self) -> None: ...  # stops everything that is still running


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
    todo, busy = deque(job for job in jobs if not job.folder.done and can_retry(job, retries)), deque[Work]()
    active: list[tuple[Any, Work]] = []

    def start() -> None:
        """Start as many waiting jobs as there are free slots, but none that others are doing or have done."""
        ready: list[Work] = []
        while todo and len(active) + len(ready) < engine.slots:
            job = todo.popleft()
            if job.folder.done:
                end(job, "found")
            elif job.folder.busy:
                busy.append(job)
            else:
                ready.append(job)
        if ready:
            active.extend(zip(engine.submit(ready), ready, strict=True))

    def end(job: Work, outcome: Outcome) -> None:
        failure = failure_of(job.folder)
        why = failure.line if failure else "unknown error"
        if outcome == "busy":
            busy.append(job)
        elif outcome == "failed" and can_retry(job, retries):
            watch.bar.say(f"{job}: failed, retrying ({why})")
            todo.append(job)
        else:
            counts[outcome] += 1
            watch.end(job, {"found": "done by another launcher", "failed": f"FAILED ({why})"}.get(outcome, outcome))

    try:
        with watch.bar:
            while todo or active or busy:
                if not todo:
                    todo.extend(busy)
                    busy.clear()
                start()
                ended = [pair for pair in active if pair[0].done()]
                for handle, job in ended:
                    active.remove((handle, job))
                    try:
                        outcome = engine.outcome(handle)
                    except WorkerLost as error:
                        outcome = "done" if job.folder.done else "failed"  # it may be lost after finishing
                        if outcome == "failed":
                            note_failure(job, str(error))
                    end(job, outcome)
                watch.look([job for _, job in active])
                if not ended and (active or busy):
                    time.sleep(engine.pause if active else TICK)  # without `active` only other launchers are working
    finally:
        engine.close()
    return counts


# Engines by name, and the resources that each uses


@dataclass(frozen=True)
class LauncherOptions:
    """What the user says about engines and resources."""

    out: Path
    workers: int | None = None
    threads: int | None = None
    retries: int = 2
    address: str | None = None  # ray
    partition: str | None = None  # slurm
    minutes: int = 240  # slurm

    def threads_of(self, jobs: Sequence[Work]) -> int | None:
        """The option's value, else the maximum of the recipes, if any."""
        return self.threads or max((job.config.threads or 0 for job in jobs), default=0) or None


class Share(NamedTuple):
    """The resources of each local worker."""

    workers: int
    threads: int
    devices: tuple[str, ...] = ()  # CUDA devices of each worker, as CUDA_VISIBLE_DEVICES; empty without CUDA


def divide(workers: int | None, threads: int | None, cores: int, cuda: Sequence[str], devices: int = 1) -> Share:
    """One worker per group of `devices` CUDA devices; without CUDA per `threads` cores, by default one."""
    if not cuda:
        if workers:
            return Share(workers, threads or max(1, cores // (workers * devices)))
        return Share(max(1, cores // ((threads or 1) * devices)), threads or 1)
    groups = [",".join(cuda[i : i + devices]) for i in range(0, len(cuda) - devices + 1, devices)]
    if not groups:
        raise ValueError(f"a run asks for {devices} devices and this machine has {len(cuda)}")
    workers = workers or len(groups)
    return Share(workers, threads or max(1, cores // workers), tuple(groups[i % len(groups)] for i in range(workers)))


def share_of(options: LauncherOptions, jobs: Sequence[Work]) -> Share:
    """The resources of a local worker on this machine."""
    import torch

    count = torch.cuda.device_count() if any(job.config.accelerator != "cpu" for job in jobs) else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = named.split(",")[:count]
    return divide(options.workers, options.threads_of(jobs), os.cpu_count() or 1, names, _devices(jobs))


def _devices(jobs: Sequence[Work]) -> int:
    """The maximum number of devices of a run."""
    return max((getattr(job.config, "devices", 1) for job in jobs), default=1)


def make_launcher(engine: str, options: LauncherOptions, jobs: Sequence[Work]) -> Launcher:
    """The launcher of `local`, `ray` or `slurm`, with the resources that the jobs need."""
    if engine == "local":
        from patchgen.sweep.local import LocalLauncher

        share = share_of(options, jobs)
        return LocalLauncher(options.out, min(share.workers, max(1, len(jobs))), share.threads, share.devices)
    from patchgen.sweep.clusters import RayLauncher, SlurmLauncher

    threads, workers = options.threads_of(jobs) or 1, options.workers
    if engine == "ray":
        cpus = workers * threads if workers and options.address is None else None
        return RayLauncher(threads, options.retries, options.address, cpus)
    gpus = 0 if all(job.config.accelerator == "cpu" for job in jobs) else _devices(jobs)
    return SlurmLauncher(
        options.out, threads, workers=workers, gpus=gpus, partition=options.partition, minutes=options.minutes
    )


# Units


class InProcess:
    """The engine of this process: runs units sequentially."""

    slots, pause = 1, 0.0

    def submit(self, jobs: Sequence[Work]) -> list[Future[Outcome]]:
        future = Future[Outcome]()
        future.set_result(perform(jobs[0]))
        return [future]

    def outcome(self, handle: Future[Outcome]) -> Outcome:
        return handle.result()

    def close(self) -> None: ...


def run_units(
    units: Sequence[Unit], engine: str | None, options: LauncherOptions, what: str = "slides", quiet: bool = False
) -> dict[str, Failure]:
    """Run the unfinished units, on an engine or (None) in this process; returns remaining failures by label."""
    for unit in units:
        if not unit.folder.busy:  # the cause of an earlier failure may have been fixed
            (unit.claim / FAILED).unlink(missing_ok=True)
    if todo := [unit for unit in units if not unit.folder.done]:
        options.out.mkdir(parents=True, exist_ok=True)
        launcher: Launcher = make_launcher(engine, options, todo) if engine else InProcess()
        launch(units, launcher, retries=options.retries, watch=Watch(units, quiet, what, what))
    remaining = {unit.label: failure_of(unit.folder) for unit in units if not unit.folder.done}
    failures = {label: failure for label, failure in remaining.items() if failure}
    if not failures:
        for parent in {unit.claim.parent for unit in units}:
            with suppress(OSError):  # still needed
                (parent / LOG).unlink(missing_ok=True)
                parent.rmdir()
    return failures

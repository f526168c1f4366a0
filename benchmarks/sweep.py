"""What a sweep costs beside its runs: runs without any work, handed out by the local engine.

    cost = measure(runs=200, workers=2)
    cost["seconds_per_run"], cost["start_seconds"]

Each run has all of a run's bookkeeping (folder, settings, lock, record, `done`) and no training. A worker imports torch
when it starts, once for all its runs; that is timed apart.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Line, at_least_one
from patchgen.config import Config
from patchgen.runs.folder import run_name
from patchgen.sweep.jobs import Job
from patchgen.sweep.launch import Watch, launch
from patchgen.sweep.local import LocalLauncher

SMALL = {"runs": 6, "workers": 1}


def no_op_jobs(count: int, out: Path, first_seed: int = 0) -> list[Job]:
    """Runs that differ in their seed and do nothing."""
    configs = [Config("nothing", "nowhere", seed=first_seed + i) for i in range(count)]
    return [
        Job((f"no-op {config.seed}",), ("",), config, out, run_name(config, "no-op"), size=1, kind="no-op")
        for config in configs
    ]


def measure(*, runs: int = 200, workers: int = 2) -> dict[str, Any]:
    """Time `runs` no-op runs on `workers` processes, after one for each worker that starts it."""
    at_least_one(runs=runs, workers=workers)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        engine = LocalLauncher(out, workers, threads=1)
        try:
            start = _time(engine, no_op_jobs(workers, out, first_seed=runs))
            jobs = no_op_jobs(runs, out)
            clock = time.monotonic()
            counts = launch(jobs, engine, retries=0, watch=Watch(jobs, quiet=True))
            seconds = time.monotonic() - clock
        finally:
            engine.close()
        done = sum(job.folder.done for job in jobs)
    return {
        "runs": runs,
        "workers": workers,
        "done": done,
        "done_here": counts["done"],
        "start_seconds": start,
        "seconds": seconds,
        "seconds_per_run": seconds / runs,
    }


def lines(result: dict[str, Any]) -> list[Line]:
    what = f"{result['done']} of {result['runs']} no-op runs on {result['workers']} workers"
    return [
        (f"{what}: seconds per run", f"{result['seconds_per_run']:.4f}"),
        ("starting the workers", f"{result['start_seconds']:.1f} s"),
    ]


def _time(engine: LocalLauncher, jobs: Sequence[Job]) -> float:
    """Seconds until each worker has answered once."""
    clock = time.monotonic()
    for handle in engine.submit(jobs):
        handle.result()
    return time.monotonic() - clock

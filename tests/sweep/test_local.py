"""Worker processes: the records of a serial run, also after a kill -9 of a worker or of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.find import failure_of
from patchgen.runs.folder import RunFolder
from patchgen.sweep.jobs import Job, Outcome
from patchgen.sweep.launch import Share, Watch, divide, launch
from patchgen.sweep.local import LocalLauncher
from patchgen.sweep.plan import plan
from patchgen.sweep.recipe import read_recipe
from patchgen.train.lifecycle import train

Recipe = Callable[[str], Path]
Plain = Callable[[RunFolder], list[dict[str, Any]]]
LONG = (
    "rows:\n  - {name: long, steps: 30, eval_every: 2}\n  - {name: short, seed: 2}\n  - {name: other, method: lp-ln}\n"
)


def lines(run: RunFolder) -> int:
    return len(run.records())


class Murderous(LocalLauncher):
    """Kills its own workers, once, when the first job has come some way."""

    victim: Job
    killed = False

    def finished(self, handles: Sequence[Future[Outcome]], seconds: float) -> list[Future[Outcome]]:
        if not self.killed and lines(self.victim.folder) >= 3 and not self.victim.folder.done:
            for worker in self.workers:
                if worker.process is not None:
                    os.kill(worker.process.pid, signal.SIGKILL)
            self.killed = True
        return super().finished(handles, 0.02)


def test_killed_workers_are_replaced_and_the_records_are_those_of_serial_runs(
    tiny_recipe: Recipe, plain: Plain, tmp_path: Path
) -> None:
    rows = "rows:\n  - {name: long, steps: 20, eval_every: 2}\n  - {name: short, seed: 2}\n"
    jobs = plan([read_recipe(tiny_recipe(rows))], tmp_path / "runs")
    engine = Murderous(tmp_path / "runs", workers=1, threads=1)
    engine.victim = jobs[0]
    assert launch(jobs, engine, retries=2, watch=Watch(jobs, quiet=True)) == {"done": 2}
    failure = failure_of(jobs[0].folder)
    assert engine.killed and failure and failure.attempts == 1 and "SIGKILL" in failure.error
    for job in jobs:
        assert isinstance(job.config, Config)
        assert plain(job.folder) == plain(train(job.config, tmp_path / "serial", quiet=True))
    assert all(worker.process is None or worker.process.poll() is not None for worker in engine.workers)


def test_a_worker_ends_with_its_launcher(tmp_path: Path) -> None:
    engine = LocalLauncher(tmp_path, workers=1, threads=1)
    process = engine.workers[0]._running()
    assert process.stdin is not None
    process.stdin.close()  # what the kernel does for a launcher that was killed
    assert process.wait(timeout=60) == -signal.SIGKILL
    engine.close()


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "cuda", "devices", "expected"),
    [
        (None, None, 8, "", 1, Share(8, 1)),
        (None, 2, 8, "", 1, Share(4, 2)),
        (None, 16, 8, "", 1, Share(1, 16)),
        (2, None, 8, "", 1, Share(2, 4)),
        (3, 2, 8, "", 1, Share(3, 2)),
        (None, 2, 8, "", 2, Share(2, 2)),
        (None, None, 8, "0,1", 1, Share(2, 4, ("0", "1"))),
        (None, 1, 8, "4,5,6,7", 2, Share(2, 1, ("4,5", "6,7"))),
        (4, None, 8, "0,1", 1, Share(4, 2, ("0", "1", "0", "1"))),
    ],
)
def test_a_machine_is_divided(
    workers: int | None, threads: int | None, cores: int, cuda: str, devices: int, expected: Share
) -> None:
    assert divide(workers, threads, cores, cuda.split(",") if cuda else [], devices) == expected


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="asks for 4 devices and this machine has 2"):
        divide(None, None, 8, ["0", "1"], devices=4)


@pytest.mark.slow
def test_a_killed_launcher_and_then_two_at_once_lose_nothing_and_repeat_nothing(
    tiny_recipe: Recipe, plain: Plain, tmp_path: Path
) -> None:
    path, out = tiny_recipe(LONG + "grid: {lr: [0.001, 0.002, 0.003]}"), tmp_path / "runs"
    path.write_text(path.read_text().replace("lr: 0.001\n", ""))
    jobs = plan([read_recipe(path)], out)
    command = [sys.executable, "-m", "patchgen", "sweep", str(path), "--out", str(out), "--workers", "2"]
    victim = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while not any(lines(job.folder) >= 3 and not job.folder.done for job in jobs[:3]):
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    victim.kill()
    victim.wait()
    while any(job.folder.busy for job in jobs):  # its workers end with it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    finished = {job.run: (job.folder.path / "done").stat().st_mtime_ns for job in jobs if job.folder.done}
    assert len(finished) < len(jobs)
    pair = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    trained = sum(line.endswith(": done") for text in said for line in text.splitlines())
    assert trained == len(jobs) - len(finished)
    for job in jobs:
        assert job.folder.done and failure_of(job.folder) is None
        assert isinstance(job.config, Config)
        assert plain(job.folder) == plain(train(job.config, tmp_path / "serial", quiet=True))
    assert all((out / run / "done").stat().st_mtime_ns == when for run, when in finished.items())

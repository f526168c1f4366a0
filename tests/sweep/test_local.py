"""Worker processes: the records of a serial run, also after a kill -9 of a worker."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.find import failure_of
from patchgen.runs.folder import RunFolder
from patchgen.sweep.clusters import RayLauncher
from patchgen.sweep.jobs import Work
from patchgen.sweep.launch import Share, Watch, divide, launch
from patchgen.sweep.local import LocalLauncher
from patchgen.sweep.plan import plan
from patchgen.sweep.recipe import read_recipe
from patchgen.train.lifecycle import train

Recipe = Callable[[str], Path]
Plain = Callable[[RunFolder], list[dict[str, Any]]]


class Killing(Watch):
    """Kills the process of the first job, once, when that has come some way."""

    killed = 0

    def look(self, active: Sequence[Work]) -> None:
        folder = self.jobs[0].folder
        ready = not self.killed and len(RunFolder(folder.path).records()) >= 3 and folder.busy
        if ready and (process := holder(folder.path / ".lock")):
            os.kill(process, signal.SIGKILL)
            self.killed = process
        super().look(active)


def holder(path: Path) -> int | None:
    """The process that has a file open."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(link) == str(path) for link in (folder / "fd").iterdir()):
                return int(folder.name)
    return None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the process to kill through /proc")
@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_killed_workers_are_replaced_and_the_records_are_those_of_serial_runs(
    kind: str, tiny_recipe: Recipe, plain: Plain, tmp_path: Path
) -> None:
    [job] = jobs = plan([read_recipe(tiny_recipe("rows: [{name: long, steps: 30, eval_every: 2}]"))], tmp_path / "runs")
    engine: Any
    if kind == "local":
        engine = LocalLauncher(tmp_path / "runs", workers=1, threads=1)
    else:
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
        engine = RayLauncher(threads=1, retries=2, cpus=2)
    watch = Killing(jobs, quiet=True)
    assert launch(jobs, engine, retries=2, watch=watch) == {"done": 1} and watch.killed
    assert isinstance(job.config, Config)
    assert plain(job.folder) == plain(train(job.config, tmp_path / "serial", quiet=True))
    if kind == "local":
        failure = failure_of(job.folder)
        assert failure and failure.attempts == 1 and "SIGKILL" in failure.error
        assert all(worker.process is None or worker.process.poll() is not None for worker in engine.workers)


def test_a_worker_ends_with_its_launcher(tmp_path: Path) -> None:
    engine = LocalLauncher(tmp_path, workers=1, threads=1)
    process = engine.workers[0]._running()
    assert process.stdin is not None
    process.stdin.close()  # what the kernel does for a launcher that was killed
    assert process.wait(timeout=60) == -signal.SIGKILL
    engine.close()


@pytest.mark.parametrize(("workers", "threads", "cuda", "devices", "expected"), [
    (None, None, "", 1, Share(8, 1)), (None, 2, "", 1, Share(4, 2)), (None, 16, "", 1, Share(1, 16)),
    (2, None, "", 1, Share(2, 4)), (3, 2, "", 1, Share(3, 2)), (None, 2, "", 2, Share(2, 2)),
    (None, None, "0,1", 1, Share(2, 4, ("0", "1"))), (None, 1, "4,5,6,7", 2, Share(2, 1, ("4,5", "6,7"))),
    (4, None, "0,1", 1, Share(4, 2, ("0", "1", "0", "1"))),
])  # fmt: skip
def test_a_machine_of_eight_cores_is_divided(
    workers: int | None, threads: int | None, cuda: str, devices: int, expected: Share
) -> None:
    assert divide(workers, threads, 8, cuda.split(",") if cuda else [], devices) == expected


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="asks for 4 devices and this machine has 2"):
        divide(None, None, 8, ["0", "1"], devices=4)

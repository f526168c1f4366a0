"""Ray: tasks that ask for CPUs give the records of serial runs, also when a worker is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.sweep.jobs import Job
from patchgen.sweep.launch import Watch, launch
from patchgen.sweep.plan import plan
from patchgen.sweep.recipe import read_recipe
from patchgen.train.lifecycle import train

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from patchgen.sweep.clusters import RayLauncher  # noqa: E402


class Murderous(RayLauncher):
    """Kills the process of its first task, once, when that has come some way."""

    victim: Job
    killed = 0

    def finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        lock = self.victim.folder.path / ".lock"
        if not self.killed and len(self.victim.folder.records()) >= 3 and self.victim.folder.busy:
            self.killed = holder(lock)
            os.kill(self.killed, signal.SIGKILL)
        return super().finished(handles, 0.02)


def holder(path: Path) -> int:
    """The process that has a file open."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == str(path) for link in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"nobody has {path} open")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the process to kill through /proc")
def test_ray_gives_the_records_of_serial_runs_after_a_kill(
    tiny_recipe: Callable[[str], Path], plain: Callable[[RunFolder], Any], tmp_path: Path
) -> None:
    text = (
        "rows:\n  - {name: long, steps: 30, eval_every: 2}\n  - {name: short, seed: 2}\n  - {name: c, method: lp-ln}\n"
    )
    jobs = plan([read_recipe(tiny_recipe(text))], tmp_path / "runs")
    engine = Murderous(threads=1, retries=2, cpus=2)
    engine.victim = jobs[0]
    assert engine.ray.cluster_resources()["CPU"] == 2
    assert launch(jobs, engine, retries=2, watch=Watch(jobs, quiet=True)) == {"done": 3}
    assert engine.killed and not engine.ray.is_initialized()
    for job in jobs:
        assert isinstance(job.config, Config)
        assert plain(job.folder) == plain(train(job.config, tmp_path / "serial", quiet=True))


@pytest.mark.slow
def test_more_threads_than_there_are_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match="--threads 5 CPUs and it has 2"):
        RayLauncher(threads=5, retries=0, cpus=2)

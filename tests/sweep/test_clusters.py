"""Ray tasks and Slurm tasks through submitit's stand-ins: the records of serial runs, also after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.sweep.clusters import RayLauncher, SlurmLauncher, SlurmTask
from patchgen.sweep.jobs import Job, to_json
from patchgen.sweep.launch import Watch, launch
from patchgen.sweep.plan import plan
from patchgen.sweep.recipe import read_recipe
from patchgen.train.lifecycle import train

NoOps = Callable[[int], list[Job]]


@pytest.fixture
def ray() -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.fixture
def submitit() -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")


class Murderous(RayLauncher):
    """Kills the process of its first task, once, when that has come some way."""

    victim: Job
    killed = 0

    def finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        if not self.killed and len(self.victim.folder.records()) >= 3 and self.victim.folder.busy:
            self.killed = holder(self.victim.folder.path / ".lock")
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
@pytest.mark.usefixtures("ray")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the process to kill through /proc")
def test_ray_gives_the_records_of_serial_runs_after_a_kill(
    tiny_recipe: Callable[[str], Path], plain: Callable[[RunFolder], Any], tmp_path: Path
) -> None:
    rows = "- {name: long, steps: 30, eval_every: 2}\n- {name: short, seed: 2}\n- {name: c, method: lp-ln}\n"
    jobs = plan([read_recipe(tiny_recipe(f"rows:\n{rows}"))], tmp_path / "runs")
    engine = Murderous(threads=1, retries=2, cpus=2)
    engine.victim = jobs[0]
    assert engine.ray.cluster_resources()["CPU"] == 2
    assert launch(jobs, engine, retries=2, watch=Watch(jobs, quiet=True)) == {"done": 3}
    assert engine.killed and not engine.ray.is_initialized()
    for job in jobs:
        assert isinstance(job.config, Config)
        assert plain(job.folder) == plain(train(job.config, tmp_path / "serial", quiet=True))


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_more_threads_than_there_are_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match="--threads 5 CPUs and it has 2"):
        RayLauncher(threads=5, retries=0, cpus=2)


@pytest.mark.usefixtures("submitit")
@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.slow)])
def test_all_are_done_in_one_array(cluster: str, no_ops: NoOps, tmp_path: Path) -> None:
    jobs = no_ops(3)
    engine = SlurmLauncher(tmp_path, 1, cluster=cluster)
    assert launch(jobs, engine, retries=1, watch=Watch(jobs, quiet=True)) == {"done": 3} and engine.open == []
    assert all(job.folder.done and len(job.folder.records()) == 1 for job in jobs)


@pytest.mark.usefixtures("submitit")
def test_what_is_stopped_is_cancelled(no_ops: NoOps, tmp_path: Path) -> None:
    engine = SlurmLauncher(tmp_path, 1, cluster="debug")
    handles = engine.submit(no_ops(2))
    engine.close()
    assert all(handle.cancelled for handle in handles)


@pytest.mark.usefixtures("submitit")
def test_a_task_that_runs_out_of_time_asks_for_the_same_again(no_ops: NoOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    [job] = no_ops(1)
    again = SlurmTask().checkpoint(to_json(job))
    assert isinstance(again.function, SlurmTask) and again.args == (to_json(job),)
    assert again.result() == "done" and job.folder.done
    assert "SLURM_NTASKS" not in os.environ  # a task is no rank of a distributed job


@pytest.mark.usefixtures("submitit")
def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="finds no srun here"):
        SlurmLauncher(tmp_path, 1)

"""Ray tasks and Slurm tasks through submitit's stand-ins."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from patchgen.sweep.clusters import RayLauncher, SlurmLauncher, SlurmTask
from patchgen.sweep.jobs import Job, to_json
from patchgen.sweep.launch import Watch, launch

NoOps = Callable[[int], list[Job]]


needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="the extra `ray` is not installed")
needs_submitit = pytest.mark.skipif(not find_spec("submitit"), reason="the extra `slurm` is not installed")


@pytest.mark.slow
@needs_ray
def test_more_threads_than_there_are_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match="--threads 5 CPUs and it has 2"):
        RayLauncher(threads=5, retries=0, cpus=2)


@needs_submitit
@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.slow)])
def test_all_are_done_in_one_array(cluster: str, no_ops: NoOps, tmp_path: Path) -> None:
    jobs = no_ops(3)
    engine = SlurmLauncher(tmp_path, 1, cluster=cluster)
    assert launch(jobs, engine, retries=1, watch=Watch(jobs, quiet=True)) == {"done": 3} and engine.open == []
    assert all(job.folder.done and len(job.folder.records()) == 1 for job in jobs)


@needs_submitit
def test_close_cancels_open_tasks(no_ops: NoOps, tmp_path: Path) -> None:
    engine = SlurmLauncher(tmp_path, 1, cluster="debug")
    handles = engine.submit(no_ops(2))
    engine.close()
    assert all(handle.cancelled for handle in handles)


@needs_submitit
def test_a_task_that_times_out_is_requeued(no_ops: NoOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    [job] = no_ops(1)
    again = SlurmTask().checkpoint(to_json(job))
    assert isinstance(again.function, SlurmTask) and again.args == (to_json(job),)
    assert again.result() == "done" and job.folder.done
    assert "SLURM_NTASKS" not in os.environ  # a task is no rank of a distributed job


@needs_submitit
def test_without_slurm_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="finds no srun here"):
        SlurmLauncher(tmp_path, 1)

"""Slurm through submitit, on its own stand-ins for a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from patchgen.sweep.jobs import Job
from patchgen.sweep.launch import Watch, launch

submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
from patchgen.sweep.clusters import SlurmLauncher, SlurmTask  # noqa: E402

NoOps = Callable[[int], list[Job]]


def go(jobs: list[Job], engine: SlurmLauncher, retries: int = 1) -> dict[str, int]:
    return launch(jobs, engine, retries=retries, watch=Watch(jobs, quiet=True))


def test_all_are_done_in_one_array(no_ops: NoOps, tmp_path: Path) -> None:
    jobs = no_ops(3)
    engine = SlurmLauncher(tmp_path, 1, cluster="debug")
    assert go(jobs, engine) == {"done": 3} and engine.open == []
    assert all(job.folder.done and len(job.folder.records()) == 1 for job in jobs)


@pytest.mark.slow
def test_processes_of_submitits_own(no_ops: NoOps, tmp_path: Path) -> None:
    jobs = no_ops(2)
    assert go(jobs, SlurmLauncher(tmp_path, 1, cluster="local")) == {"done": 2}


def test_what_is_stopped_is_cancelled(no_ops: NoOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlurmLauncher(tmp_path, 1, cluster="debug")
    handles = engine.submit(no_ops(2))
    engine.close()
    assert all(handle.cancelled for handle in handles)


def test_a_task_that_runs_out_of_time_asks_for_the_same_again(no_ops: NoOps) -> None:
    [job] = no_ops(1)
    again = SlurmTask().checkpoint(job.to_json())
    assert isinstance(again.function, SlurmTask) and again.args == (job.to_json(),)
    assert again.result() == "done" and job.folder.done


def test_a_task_is_no_rank_of_a_distributed_job(no_ops: NoOps, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("SLURM_NTASKS", "1")
    [job] = no_ops(1)
    SlurmTask()(job.to_json())
    assert "SLURM_NTASKS" not in os.environ


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="finds no srun here"):
        SlurmLauncher(tmp_path, 1)

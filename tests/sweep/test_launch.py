"""The launcher's loop, with an engine that works in this process: what is begun, tried again, put aside."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from patchgen.runs.find import failure_of
from patchgen.runs.folder import RunFolder
from patchgen.sweep import jobs as jobs_module
from patchgen.sweep import launch as launch_module
from patchgen.sweep.jobs import Job, Outcome, perform
from patchgen.sweep.launch import LauncherLost, Watch, WorkerLost, launch

NoOps = Callable[[int], list[Job]]


class InProcess(launch_module.InProcess):
    """An engine of threads; `asked` has every job that it was given."""

    def __init__(self, slots: int = 2, do: Callable[[Job], Outcome] = perform) -> None:
        self.slots, self.pause, self.do, self.asked, self.most = slots, 0.01, do, list[Job](), 0
        self.pool = ThreadPoolExecutor(slots)
        self.closed = False

    def submit(self, jobs: Sequence[Any]) -> list[Future[Outcome]]:
        self.asked += jobs
        self.most = max(self.most, self.pool._work_queue.qsize() + len(jobs))
        return [self.pool.submit(self.do, job) for job in jobs]

    def close(self) -> None:
        self.closed = True
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "TICK", 0.01)


def go(jobs: Sequence[Job], engine: Any, retries: int = 2) -> Counter[str]:
    return launch(jobs, engine, retries=retries, watch=Watch(jobs, quiet=True))


def test_all_jobs_are_done_once_within_the_slots(no_ops: NoOps) -> None:
    engine, jobs = InProcess(slots=3), no_ops(10)
    assert go(jobs, engine) == {"done": 10}
    assert engine.asked == jobs and engine.most <= 3 and engine.closed
    assert all(job.folder.done and len(job.folder.records()) == 1 for job in jobs)
    again = InProcess()
    assert go(jobs, again) == {} and again.asked == []


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_retries_are_bounded(retries: int, attempts: int, no_ops: NoOps, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jobs_module.WORK["no-op"]

    def work(job: Job) -> None:
        if job.config.seed == 1:
            raise RuntimeError("no luck")
        whole(job)

    monkeypatch.setitem(jobs_module.WORK, "no-op", work)
    engine, jobs = InProcess(), no_ops(3)
    assert go(jobs, engine, retries) == {"done": 2, "failed": 1}
    failure = failure_of(jobs[1].folder)
    assert failure and failure.attempts == attempts == engine.asked.count(jobs[1])
    assert go(jobs, InProcess(), retries) == {}  # the attempts of an earlier launch count


def test_a_lost_worker_costs_its_run_one_attempt(no_ops: NoOps) -> None:
    lost: list[Job] = []

    def do(job: Job) -> Outcome:
        if job.config.seed == 2 and not lost:
            lost.append(job)
            raise WorkerLost("ended with SIGKILL")
        return perform(job)

    jobs = no_ops(4)
    assert go(jobs, InProcess(do=do)) == {"done": 4}
    failures = [failure_of(job.folder) for job in jobs]
    assert [f.attempts if f else 0 for f in failures] == [0, 0, 1, 0]
    assert failures[2] and failures[2].error == "ended with SIGKILL"


def test_a_lost_engine_ends_the_sweep_without_failed_runs(no_ops: NoOps) -> None:
    def dies(job: Job) -> Outcome:
        raise LauncherLost("nobody is left")

    engine, jobs = InProcess(do=dies), no_ops(3)
    with pytest.raises(LauncherLost, match="nobody is left"):
        go(jobs, engine)
    assert engine.closed and not any(failure_of(job.folder) for job in jobs)
    assert go(jobs, InProcess()) == {"done": 3}


def test_runs_of_other_processes_are_awaited_and_resumed(no_ops: NoOps) -> None:
    jobs = no_ops(4)
    held = RunFolder.create(jobs[0].out, jobs[0].config, jobs[0].run)
    other = RunFolder.create(jobs[1].out, jobs[1].config, jobs[1].run)
    left, finished = held.locked(), other.locked()
    left.__enter__()
    finished.__enter__()

    def do(job: Job) -> Outcome:
        if job.config.seed == 3:  # while the last free run is done, one of the others ends and one is abandoned
            other.finish("")
            finished.__exit__(None, None, None)
            left.__exit__(None, None, None)
        return perform(job)

    engine = InProcess(slots=1, do=do)
    assert go(jobs, engine) == {"done": 3, "found": 1}
    assert engine.asked == [jobs[2], jobs[3], jobs[0]]


def test_two_launchers_never_do_the_same_run(no_ops: NoOps, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, worked = jobs_module.WORK["no-op"], list[int]()

    def work(job: Job) -> None:
        whole(job)
        worked.append(job.config.seed)

    monkeypatch.setitem(jobs_module.WORK, "no-op", work)
    jobs = no_ops(30)
    with ThreadPoolExecutor(2) as pool:
        counts = [future.result() for future in [pool.submit(go, jobs, InProcess(slots=4)) for _ in range(2)]]
    assert all(job.folder.done and len(job.folder.records()) == 1 for job in jobs)
    assert all(count["failed"] == 0 and count["done"] + count["found"] == 30 for count in counts)


def test_progress_counts_finished_runs(no_ops: NoOps, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = no_ops(2)
    launch(jobs, InProcess(slots=1), retries=0, watch=Watch(jobs))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("sweep [1/2] ") and said[0].endswith("1 of 2 runs: no-op 0: done")
    assert said[1].startswith("sweep [2/2] 2 of 2 runs")

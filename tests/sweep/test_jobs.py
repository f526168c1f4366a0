"""Jobs: the name a run will have, each run once, what has become of it, and an error that is kept."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from patchgen.ccd.settings import StreamConfig
from patchgen.config import Config
from patchgen.runs.find import failure_of, state_of
from patchgen.runs.folder import ProcessDied, RunBusy, RunFolder
from patchgen.sweep import jobs as jobs_module
from patchgen.sweep.jobs import Job, Needs, Unit, Work, can_retry, note_failure, perform, read_work, to_json
from patchgen.sweep.plan import plan
from patchgen.sweep.recipe import read_recipe
from patchgen.train.lifecycle import train

Recipe = Callable[[str], Path]
NoOps = Callable[[int], list[Job]]


def test_a_job_has_the_name_that_training_gives_its_folder(tiny_recipe: Recipe, tmp_path: Path) -> None:
    [job] = plan([read_recipe(tiny_recipe("grid: {seed: [3]}"))], tmp_path / "runs", threads=1)
    assert job.state == "waiting" and job.progress == 0 and job.size == 5
    assert isinstance(job.config, Config)
    run = train(job.config, tmp_path / "runs", quiet=True)
    assert run.path == job.folder.path and job.state == "done" and job.progress == 5
    assert perform(job) == "found"


def test_a_run_in_two_rows_is_one_job(tiny_recipe: Recipe, tmp_path: Path) -> None:
    rows = "rows:\n  - {name: A, method: lp}\n  - {name: B, lr: 0.001}\n  - {name: C, lr: 0.5}\n"
    jobs = plan([read_recipe(tiny_recipe(rows))] * 2, tmp_path)
    assert [job.rows for job in jobs] == [("A", "B"), ("C",)] and [str(job) for job in jobs] == ["A; B", "C"]


@pytest.mark.parametrize(("old", "new", "message"), [
    ("seed: [1]", "method: [lp, pathcgen]", "method pathcgen: unknown method 'pathcgen'; did you mean 'patchgen'"),
    ("seed: [1]", "hparams.miro: [1.0]", "miro 1.0: method 'lp' has no hyper-parameter 'miro'"),
    ("unseen: studio", "unseen: studoi", "'studoi' is not a domain of .*did you mean 'studio'"),
    ("data: /", "data: /nowhere/", "No such data"),
    ("unseen: studio", "unseen: none\nselect: oracle", "seed 1: --select oracle looks at an unseen domain"),
])  # fmt: skip
def test_wrong_settings_are_reported_before_anything_starts(
    old: str, new: str, message: str, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    path = tiny_recipe("grid: {seed: [1]}")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        plan([read_recipe(path)], tmp_path)


def test_weights_of_one_name_in_two_folders_are_two_runs(tiny_recipe: Recipe, tmp_path: Path) -> None:
    files = [tmp_path / name / "model.safetensors" for name in ("w1", "w2")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(file.parent.name.encode())
    path = tiny_recipe(f"grid: {{backbone: [{files[0]}, {files[1]}, {files[0]}]}}")
    path.write_text(path.read_text().replace("backbone: tiny\n", ""))
    assert [job.config.backbone for job in plan([read_recipe(path)], tmp_path)] == [str(file) for file in files]


@pytest.mark.parametrize("work", [
    Job(("a", "b"), ("",), Config("a", "x", hparams={"miro": 0.5}), Path("/out"), "abc", 7, kind="no-op", track=True),
    Job(("c",), ("",), StreamConfig("b", method="gcd"), Path("/out"), "def", 7, track=True),
    Unit("patchgen.x:y", {"word": "a"}, Path("/claim"), Path("/result"), "unit a", Needs(1, "cpu")),
])  # fmt: skip
def test_work_crosses_a_process_as_one_line(work: Work) -> None:
    text = to_json(work)
    again = read_work(text)
    assert again == work and getattr(again, "track", True) and "\n" not in text


def test_states(no_ops: NoOps) -> None:
    [job] = no_ops(1)
    assert job.state == "waiting"
    run = RunFolder.create(job.out, job.config, job.run)
    assert job.state == "unfinished"
    with run.locked():
        assert job.state == "running" and perform(job) == "busy"
        with pytest.raises(RunBusy, match="being trained by another process"), run.locked():
            pass
    note_failure(job, "first line\nlast line")
    assert job.state == "failed"
    with run.locked():
        assert job.state == "running"  # outweighs an old failure
    assert perform(job) == "done" and job.state == "done"
    assert failure_of(run) is not None  # the error stays for whoever wants to know
    assert len(run.records()) == 1 and perform(job) == "found"


@pytest.mark.parametrize(("error", "final", "line"), [
    (RuntimeError("CUDA out of memory"), False, "RuntimeError: CUDA out of memory"),
    (ValueError("--lr is wrong"), True, "--lr is wrong"), (OSError("disk full"), False, "disk full"),
    (ProcessDied("SIGABRT"), False, "SIGABRT"),
])  # fmt: skip
def test_errors_are_counted_and_final_ones_are_not_retried(
    error: Exception, final: bool, line: str, no_ops: NoOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    [job] = no_ops(1)

    def fail(_: Job) -> None:
        raise error

    monkeypatch.setitem(jobs_module.WORK, "no-op", fail)
    for attempt in (1, 2, 3):
        assert can_retry(job, retries=2) == (not final or attempt == 1)
        assert perform(job) == "failed"
        failure = failure_of(job.folder)
        assert failure and (failure.attempts, failure.final, failure.line) == (attempt, final, line)
        assert ("Traceback" in failure.error) == isinstance(error, RuntimeError)
    assert not can_retry(job, retries=2) and can_retry(job, retries=3) == (not final)
    assert set(json.loads((job.folder.path / "failed.json").read_text())) == {"attempts", "error", "time", "final"}
    assert state_of(job.folder) == "failed" and (job.folder.path / "config.yaml").exists()

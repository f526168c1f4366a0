"""`patchgen runs`: what is listed, compared and cleared away, and what never is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from patchgen.ccd.settings import StreamConfig
from patchgen.cli import main
from patchgen.config import Config
from patchgen.runs.find import describe, differences, find_runs, remove
from patchgen.runs.folder import RunFolder
from patchgen.sweep.jobs import Job, note_failure, perform

NoOps = Callable[[int], list[Job]]


@pytest.fixture
def five(no_ops: NoOps) -> list[Job]:
    """done, failed, unfinished, running (the test must lock it), done."""
    jobs = no_ops(5)
    scored = RunFolder.create(jobs[0].out, jobs[0].config, jobs[0].run)
    scored.append({"kind": "test", "checkpoint": "selected", "all": {"accuracy": 0.625}})
    for job in (jobs[0], jobs[4]):
        perform(job)
        for name in ("selected", "swad"):
            job.folder.checkpoint(name).write_bytes(b"x" * 1000)
    note_failure(jobs[1], "no luck")
    for job in jobs[2:4]:
        RunFolder.create(job.out, job.config, job.run)
    return jobs


def there(jobs: list[Job]) -> list[bool]:
    return [job.folder.path.exists() for job in jobs]


def test_list(five: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with five[3].folder.locked():
        assert main(["runs", str(tmp_path), "--json"]) == 0
        found = {line["run"]: line for line in json.loads(capsys.readouterr().out)}
        lines = [found[str(job.folder.path)] for job in five]
        assert [line["state"] for line in lines] == ["done", "failed", "unfinished", "running", "done"]
        assert main(["runs", str(tmp_path)]) == 0
    assert lines[0]["accuracy"] == 0.625 and lines[1]["error"] == "no luck" and lines[4]["seed"] == 4
    text = capsys.readouterr().out
    assert "62.5" in text and "no luck" in text and "nowhere" in text


def test_damaged_runs_are_listed_with_their_error(five: list[Job], tmp_path: Path) -> None:
    (five[0].folder.path / "config.yaml").write_text("nonsense: 1\n")
    (five[4].folder.path / "records.jsonl").write_text("not JSON\n")
    lines = {line.run: line for line in map(describe, find_runs([tmp_path]))}
    assert "unknown setting 'nonsense'" in (lines[str(five[0].folder.path)].error or "")
    assert "damaged" in (lines[str(five[4].folder.path)].error or "")


def test_a_stream_has_no_unseen_domain(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, StreamConfig("birds", method="gcd"), "abc")
    run.append({"kind": "average", "checkpoint": "kept", "transductive": {"all": 0.5}})
    line = describe(run)
    assert (line.method, line.data, line.unseen, line.accuracy) == ("gcd", "birds", "", 0.5)


def test_empty_and_missing_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0 and "no runs" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert main(["runs", "clean", str(tmp_path)]) == 2 and "--failed, --unfinished" in capsys.readouterr().err


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = RunFolder.create(tmp_path, Config("d", "x", lr=0.5), "a")
    b = RunFolder.create(tmp_path, Config("d", "x", seed=2), "b")
    c = RunFolder.create(tmp_path, StreamConfig("d"), "c")
    assert differences(a, b) == {"lr": (0.5, Config.lr), "seed": (1, 2)}
    assert differences(a, c)["epochs"] == (None, StreamConfig.epochs) and differences(a, a) == {}
    assert main(["runs", "diff", str(a.path), str(b.path)]) == 0
    text = capsys.readouterr().out
    assert "lr" in text and "0.5" in text and "steps" not in text
    assert main(["runs", "diff", str(a.path), str(a.path)]) == 0 and "same settings" in capsys.readouterr().out


def test_clean_is_a_dry_run_without_yes(five: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["runs", "clean", str(tmp_path), "--failed", "--unfinished"]
    with five[3].folder.locked():
        assert main(words) == 0 and there(five) == [True] * 5
        text = capsys.readouterr().out
        assert text.count("would be removed") == 2 and "--yes" in text
        assert main([*words, "--yes"]) == 0
    assert there(five) == [True, False, False, True, True]
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name.endswith(".removed")]


def test_clean_keeps_records_and_the_named_checkpoints(five: list[Job], tmp_path: Path) -> None:
    assert main(["runs", "clean", str(tmp_path), "--keep-checkpoints", "selected", "--yes"]) == 0
    for job in (five[0], five[4]):
        assert job.folder.checkpoint("selected").exists() and not job.folder.checkpoint("swad").exists()
        assert job.folder.done and job.folder.records()
    assert there(five) == [True] * 5


def test_a_running_run_is_never_removed(five: list[Job]) -> None:
    with five[3].folder.locked():
        assert not remove(five[3].folder.path)
    assert there(five) == [True] * 5


def test_hidden_folders_and_other_files_are_ignored(five: list[Job], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: x\n")
    five[0].folder.path.rename(five[0].out / ".hidden")
    assert {run.path.name for run in find_runs([tmp_path])} == {job.run for job in five[1:]}

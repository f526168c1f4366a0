"""`patchgen sweep` as a user calls it: what is foretold, done, said at the end, and written down."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.sweep import jobs, local
from patchgen.sweep.jobs import Job
from patchgen.sweep.launch import InProcess
from patchgen.sweep.recipe import find_recipe


@pytest.fixture
def words(image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(local, "LocalLauncher", lambda *share: InProcess())
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"# A small table.\n#   patchgen sweep r.yaml\ndata: {image_folder}\nunseen: studio\nbackbone: tiny\n"
        "image_size: 28\nsteps: 3\neval_every: 1\nbatch_per_domain: 2\nval_images: 3\nlr: 0.001\n"
        "rows:\n  - {name: probe, method: lp}\n  - {name: MIRO, method: miro, hparams.miro: 0.25}\n"
    )
    return ["sweep", str(recipe), "--out", str(tmp_path / "runs")]


def test_a_dry_run_starts_nothing(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "2 runs in" in text and "2 waiting" in text and "probe" in text and "stated rate" in text
    assert not (tmp_path / "runs").exists()
    [step] = [line for line in text.splitlines() if line.startswith("largest step: ")]
    assert "for 4 images at once" in step and step.endswith(": MIRO") and "WARNING" not in text
    [budget] = [line for line in text.splitlines() if "lp, miro" in line]  # both share one
    assert [cell.strip() for cell in budget.strip("│").split("│")] == [
        "photos", "2", "3", "1", "2 a domain", "0.001", "lp, miro"
    ]  # fmt: skip


def test_a_sweep_is_done_once_and_its_parameters_are_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "parameters.md"
    assert main([*words, "--threads", "1", "--parameters", str(page)]) == 0
    first = capsys.readouterr()
    assert first.out.strip().endswith("2 runs in " + str(tmp_path / "runs") + ": 2 done")
    assert "forecast" in first.err and "2 of 2 runs: MIRO: done" in first.err
    text = page.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["steps", "3"] in rows and ["threads", "1"] in rows and ["lambda_conf", "1"] in rows
    assert ["method", "lp"] in rows and ["tune", "head"] in rows and "# A small table." in text
    assert any(row[0] == "hparams" and "miro=0.25" in row[1] for row in rows)
    [split] = {hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in tmp_path.glob("runs/*/splits.csv")}
    assert ["photos", "1", "splits.csv", split, "2"] in rows
    assert any(row[0] == "packages torch" for row in rows)

    assert main([*words, "--json"]) == 0
    again = capsys.readouterr()
    assert [run["state"] for run in json.loads(again.out)] == ["done", "done"] and "of 2 runs:" not in again.err


def test_runs_that_were_collected_are_not_run_again(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--quiet"]) == 0
    rows, elsewhere = tmp_path / "rows.csv", [*words[:-1], str(tmp_path / "new machine")]
    assert main(["runs", "collect", str(tmp_path / "runs"), "--csv", str(rows)]) == 0
    whole = rows.read_text().splitlines(keepends=True)
    assert len(whole) == 3
    rows.write_text("".join(line for line in whole if ",miro," not in line))
    capsys.readouterr()
    assert main([*elsewhere, "--collected", str(rows)]) == 0
    assert "1 of 2 runs are in" in capsys.readouterr().err
    done = [json.loads(path.read_text()) for path in (tmp_path / "new machine").glob("*/env.json")]
    assert len(done) == 1
    assert main(["runs", "collect", str(tmp_path / "new machine"), "--csv", str(rows)]) == 0
    assert sorted(rows.read_text().splitlines()) == sorted(line.rstrip("\r\n") for line in whole)


def test_failed_runs_are_told_with_their_error_and_tried_again_when_asked(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def work(job: Job) -> None:
        tried.append(str(job))
        raise RuntimeError("no luck") if str(job) == "probe" else ValueError("--lr is wrong")

    monkeypatch.setitem(jobs.WORK, "train", work)
    assert main([*words, "--retries", "1"]) == 1
    assert sorted(tried) == ["MIRO", "probe", "probe"]  # wrong settings are not tried again
    said = capsys.readouterr()
    assert "failed after 2 attempts: probe" in said.err and "RuntimeError: no luck" in said.err
    assert "failed after 1 attempt: MIRO" in said.err and "--retry-failed" in said.err and "2 failed" in said.out
    assert main([*words, "--retries", "1"]) == 1 and len(tried) == 3
    assert main([*words, "--retries", "1", "--retry-failed"]) == 1 and len(tried) == 6


def test_missing_extras_are_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine, package in (("ray", "ray"), ("slurm", "submitit")):
        monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
        assert main([*words, "--engine", engine]) == 2
        assert f'pip install "patchgen[{engine}]"' in capsys.readouterr().err


def test_recipes_of_the_package_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also as `report` prints them, from a folder that has no configs/."""
    monkeypatch.chdir(tmp_path)
    assert find_recipe("engines-small") == find_recipe("configs/small/engines-small.yaml")
    assert find_recipe("engines-small").is_file() and not Path("configs").exists()
    (tmp_path / "engines-small").write_text("steps: 3\n")  # a file that is there comes first
    assert main(["sweep", "engines-small", "--dry-run"]) == 2
    assert "it is no recipe" in capsys.readouterr().err
    assert main(["sweep", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "engines-small" in listed and "Twenty-four runs" in listed and "ccd-cub-small" not in listed

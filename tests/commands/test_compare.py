"""`patchgen compare` from the command line on a tiny data set: runs, skips, tables, JSON and mistakes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from patchgen.cli import main
from patchgen.commands.compare import CompareOptions, planned_runs
from patchgen.commands.settings import parse_settings
from patchgen.runs.folder import RunFolder
from patchgen.train import fold, lifecycle

DOMAINS = ("clinic", "field", "studio")
METHODS = ("lp", "patchgen")
SMALL = (
    "--backbone tiny --image-size 28 --steps 2 --eval-every 1 --batch-per-domain 2 --val-images 3 --threads 1 --quiet"
)


def words(folder: Path, out: Path, *more: str) -> list[str]:
    return ["compare", str(folder), *SMALL.split(), "--out", str(out), "--methods", *METHODS, *more]


@pytest.fixture(scope="module")
def runs(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare")
    assert main(words(image_folder, out)) == 0
    return out


def test_every_fold_of_every_method_is_a_finished_run(runs: Path) -> None:
    done = [RunFolder.open(path) for path in runs.iterdir()]
    assert all(run.done for run in done)
    found = {(run.config.method, run.config.unseen) for run in done}
    assert found == {(method, domain) for method in METHODS for domain in DOMAINS} and len(done) == 6


def test_finished_runs_are_skipped(
    runs: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}

    def refuse(*args: Any) -> None:
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(fold, "fit", refuse)
    assert main(words(image_folder, runs, "--details")) == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before
    text = capsys.readouterr().out
    # 2 checkpoints x 2 parts, other scores, validation
    assert text.count("| method ") == 6 and "are missing" not in text
    assert "balanced accuracy" in text.partition("Other scores")[2]


def test_the_table_holds_the_cells(runs: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(image_folder, runs, "--table-only", "--json")) == 0
    cells = json.loads(capsys.readouterr().out)
    assert main(words(image_folder, runs, "--table-only")) == 0
    text = capsys.readouterr().out
    assert text.count("| method ") == 1 and "--details" in text  # one table, and a verdict
    assert re.search(r"^Best on average: (lp|patchgen) \([\d.]+ %\)\.$", text, re.MULTILINE)
    assert re.search(r"^Against (lp|patchgen): \d+ of 90 images apart, one seed: (no difference|better)", text, re.M)
    section = text.split("Accuracy, selected checkpoint, on the whole unseen domain (%)")[1].split("Accuracy")[0]
    [line] = [line for line in section.splitlines() if line.startswith("| lp ")]
    mine = {c["unseen"]: c["accuracy"] for c in cells
            if (c["method"], c["checkpoint"], c["part"]) == ("lp", "selected", "all")}  # fmt: skip
    shown = [*(mine[domain] for domain in DOMAINS), sum(mine.values()) / 3]
    assert [word.strip() for word in line.split("|")[2:-1]] == [f"{100 * value:.1f}" for value in shown]


@pytest.mark.parametrize("flag", ["--table-only", "--table_only"])
def test_table_only_names_what_is_missing_and_trains_nothing(
    flag: str, runs: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(runs.iterdir())
    assert main(words(image_folder, runs, flag, "--seeds", "1", "2", "--folds", "field")) == 0
    text = capsys.readouterr().out
    assert set(runs.iterdir()) == before
    assert "2 of 4 runs are missing:" in text
    for method in METHODS:  # at the preset's rate
        assert f"\n  {method}, unseen field, seed 2, lr 0.003\n" in text
    assert "seed 1" not in text
    command = text.splitlines()[-1]
    assert command.startswith("  patchgen compare ") and "only" not in command and command.endswith("--folds field")
    assert main(words(image_folder, runs, flag, "--seeds", "1", "2", "--folds", "field", "--json")) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) > 0 and "2 of 4 runs are missing" in said.err


def test_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, seen = lifecycle.train, []

    def fails(config: Any, *args: Any, **more: Any) -> Any:
        seen.append(config.method)
        if config.method == "lp":
            raise ValueError("training diverged")
        return whole(config, *args, **more)

    monkeypatch.setattr(lifecycle, "train", fails)
    assert main(words(image_folder, tmp_path, "--folds", "studio")) == 1
    said = capsys.readouterr()
    assert seen == ["lp", "patchgen"] and "run 1 failed: training diverged" in said.err
    assert "1 of 2 runs are missing:\n  lp, unseen studio" in said.out


# From options to runs


def test_jobs_are_fold_by_fold_under_identical_settings() -> None:
    words = shlex.split("photos --methods lp lp-ln@mean --seeds 1 2 --lr-grid 0.1 0.2 --lr-backbone 0.5 --steps 7")
    jobs: list[Any] = list(planned_runs(*parse_settings(CompareOptions, words), ("art", "photo")))
    order = [(j.config.unseen, j.config.seed, j.row, j.config.lr) for j in jobs]
    wanted = [
        (unseen, seed, label, lr) for unseen in ("art", "photo") for seed in (1, 2) for label in ("lp", "lp-ln@mean")
        for lr in (0.1, 0.2)
    ]  # fmt: skip
    assert order == wanted
    assert all(j.config.lr_module is None and j.config.lr_backbone == 0.5 and j.config.steps == 7 for j in jobs)
    assert {(j.config.method, j.config.pool) for j in jobs} == {("lp", None), ("lp-ln", "mean")}

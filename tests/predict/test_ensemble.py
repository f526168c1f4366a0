"""Ensembles: the mean of probabilities against a loop, and runs that do not belong together."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.predict.fold_runs import score_ensemble
from patchgen.predict.predictor import load_run
from patchgen.runs.folder import RunFolder

MakeRun = Callable[..., RunFolder]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tiny_run: MakeRun) -> list[RunFolder]:
    """Another method, seed and image size each: what an ensemble may differ in."""
    return [
        tiny_run("sma", lr=0.01),
        tiny_run("patchgen+sma", seed=2, lr=0.01),
        tiny_run("lp-ln", image_size=42, lr=0.01),
    ]


@pytest.fixture
def words(runs: list[RunFolder]) -> list[str]:
    return [str(run.path) for run in runs]


def predicted(run: RunFolder, image_folder: Path, paths: list[str]) -> np.ndarray:
    found = load_run(run.path).predict([image_folder / path for path in paths], batch=7)
    return np.stack([one.probabilities for one in found])  # type: ignore[union-attr]


def test_it_is_the_mean_of_the_runs_probabilities(runs: list[RunFolder], image_folder: Path) -> None:
    found = score_ensemble([run.path for run in runs])
    table = found.fold.table
    paths = [table.paths[row] for row in found.rows]
    assert sorted(paths) == sorted(str(p.relative_to(image_folder)) for p in image_folder.glob("studio/*/*.png"))
    each = [predicted(run, image_folder, paths) for run in runs]
    np.testing.assert_allclose(found.probabilities, sum(each) / 3, atol=1e-5)
    right = [path.split("/")[1] == found.fold.classes[p.argmax()] for path, p in zip(paths, sum(each), strict=True)]
    inside = set(found.fold.test["in"].tolist())
    part = [hit for hit, row in zip(right, found.rows.tolist(), strict=True) if row in inside]
    assert found.whole["accuracy"] == pytest.approx(np.mean(right)) and found.whole["images"] == 30
    assert found.part["accuracy"] == pytest.approx(np.mean(part)) and found.part["images"] == len(part) == 24
    mean = np.mean([member.whole["accuracy"] for member in found.members])
    assert found.gain == pytest.approx(found.whole["accuracy"] - mean)
    assert [member.name for member in found.members] == ["sma", "patchgen+sma", "lp-ln"]


@pytest.mark.parametrize("checkpoint", ["selected", "swad"])
def test_a_run_with_its_twin_has_the_runs_own_numbers(checkpoint: Any, runs: list[RunFolder], tmp_path: Path) -> None:
    twin = shutil.copytree(runs[0].path, tmp_path / "twin")
    found = score_ensemble([runs[0].path, twin], checkpoint=checkpoint)
    [test] = [record for record in runs[0].records("test") if record["checkpoint"] == checkpoint]
    for scored in (found, *found.members):
        assert {name: scored.whole[name] for name in test["all"]} == pytest.approx(test["all"])
        assert scored.whole["per_class"] == pytest.approx(test["per_class"])
        assert scored.part["accuracy"] == pytest.approx(test["in"]["accuracy"])
    assert found.gain == 0


def test_the_command_prints_the_runs_beside_the_ensemble(words: list[str], tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "found.csv"
    assert main(["evaluate", *words, "--out", str(target)]) == 0
    table = capsys.readouterr().out
    assert main(["evaluate", *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    rows = [(f"{run['name']} {run['run']}", run["part"], run["whole"]) for run in record["runs"]]
    for name, part, whole in [*rows, ("ensemble", *record["ensemble"].values())]:
        [line] = [line for line in table.splitlines() if f" {name} " in line and "│" in line]
        expected = [part["accuracy"], whole["accuracy"], whole["f1"]]
        assert [float(cell) for cell in line.split("│")[2:5]] == pytest.approx(expected, abs=5e-5)
    assert record["unseen"] == "studio" and record["checkpoint"] == "selected"
    assert table.splitlines()[-1] == str(target)
    lines = list(csv.DictReader(target.open()))
    assert list(lines[0])[:5] == ["path", "part", "truth", "label", "confidence"] and len(lines) == 30
    hits = [line["truth"] == line["label"] for line in lines]
    assert np.mean(hits) == pytest.approx(record["ensemble"]["whole"]["accuracy"])
    for line in lines:
        assert line["truth"] == line["path"].split("/")[1]
        assert float(line["confidence"]) == max(float(line[f"p_{name}"]) for name in ("circle", "cross", "square"))


# Runs that do not belong together


def test_one_run_is_no_ensemble(words: list[str]) -> None:
    with pytest.raises(ValueError, match="an ensemble needs at least two different runs"):
        score_ensemble([words[0], f"{words[0]}/."])


@pytest.mark.parametrize(
    ("change", "rule"), [("fewer", "not the same data"), ("pixels", "have the same names, but other contents")]
)
def test_other_data_are_refused(
    change: str, rule: str, words: list[str], tiny_run: MakeRun, image_folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(image_folder, tmp_path / "photos")
    if change == "fewer":
        (other / "studio/circle/00.png").unlink()
    else:
        Image.new("RGB", (30, 30)).save(other / "studio/circle/00.png")
    run = tiny_run("lp-ln", steps=1, data=str(other)).path
    with pytest.raises(ValueError, match=f"was not trained on the data at .*{rule}"):
        score_ensemble([words[0], run])


def test_the_same_data_may_have_moved(runs: list[RunFolder], image_folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(image_folder, tmp_path / "elsewhere")
    here, there = score_ensemble([r.path for r in runs[:2]]), score_ensemble([r.path for r in runs[:2]], str(moved))
    assert here.whole == there.whole


def test_runs_that_cannot_be_averaged_are_refused(words: list[str], tiny_run: MakeRun, tmp_path: Path) -> None:
    unfinished = shutil.copytree(words[1], tmp_path / "unfinished")
    (unfinished / "done").unlink()
    plain = tiny_run("lp-ln", steps=1, unseen="field").path
    discovery = tiny_run("lp-ln", steps=1, task="mdg_gcd").path
    every = [tiny_run("lp-ln", steps=1, unseen="none", swad=False, seed=seed).path for seed in (1, 2)]
    for runs, rule in (
        ([words[0], unfinished], "is not finished"),
        ([words[0], plain], "left out 'field', but .* left out 'studio'; only runs of one fold"),
        ([words[0], discovery], "whose outputs for new classes mean something else in every run"),
        (every, "it has no unseen domain"),
    ):
        with pytest.raises(ValueError, match=rule):
            score_ensemble(runs)


@pytest.mark.parametrize(("more", "rule"), [
    (["nowhere"], "No such data"),
    (["RUN", "nowhere"], "no run folder"),
    (["RUN", "--checkpoint", "swad"], "needs a finished run trained with --swad"),
    (["RUN", "--out", "found.txt"], "--out must be a file that ends in .csv"),
    (["RUN", "--out", "no/x.csv"], "make it first"),
])  # fmt: skip
def test_mistakes_are_one_sentence(
    more: list[str], rule: str, words: list[str], tiny_run: MakeRun, capsys: Captured
) -> None:
    plain = str(tiny_run("lp-ln", steps=1, swad=False).path)
    assert main(["evaluate", words[0], *(plain if word == "RUN" else word for word in more)]) == 2
    assert rule in capsys.readouterr().err

"""`patchgen fit` as a user calls it, and runs that leave no domain out."""

import csv
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patchgen.cli import main
from patchgen.config import Config
from patchgen.fit import BEST, procedure
from patchgen.fit.plan import Plan, Rate, estimate, within
from patchgen.predict.fold_runs import predictions_at, rows_of
from patchgen.predict.model_folder import FILES
from patchgen.predict.predictor import load_predictor, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import read_predictions, save_predictions
from patchgen.tasks import make_fold

CHEAP = shlex.split(
    "--backbone tiny --image-size 56 --steps 3 --eval-every 2 --batch-per-domain 4 --val-images 4 --lr 0.01 --swad"
)
ALONE = ["--method", "patchgen-select"]
QUICK = shlex.split("--backbone tiny --image-size 56 --steps 2 --eval-every 2 --batch-per-domain 4 --val-images 4")
CLASSES = ("circle", "cross", "square")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def model(image_folder: Path, home: Path) -> Path:
    words = ["fit", str(image_folder), "--out", str(home / "model"), "--runs", str(home / "runs"), *CHEAP, *ALONE]
    assert main(words) == 0
    return home / "model"


def test_the_same_command_only_looks_up_what_is_done(
    model: Path, image_folder: Path, home: Path, capsys: Captured
) -> None:
    before = {file: file.stat().st_mtime_ns for file in home.glob("runs/*/done")}
    words = ["fit", str(image_folder), "--out", str(home / "again"), "--runs", str(home / "runs"), *CHEAP, *ALONE]
    capsys.readouterr()
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert {file: file.stat().st_mtime_ns for file in home.glob("runs/*/done")} == before and len(before) == 4
    assert out.splitlines()[-1] == str(home / "again")
    assert "expected accuracy at a new site: 0." in out and "95 % t-intervals over 3 sites" in out
    assert "training 4 of 4: on all sites; finished earlier" in err
    assert "training 1 of 4: without clinic, to be scored on it; finished earlier" in err
    assert f"4 finished in {home / 'runs'}" in err and "calibrating confidence on" in err
    assert "calibrating [" in err and "will take" not in err  # signs of life, and nothing that is known already
    for site in ("clinic", "field", "studio"):
        assert sum(site in line for line in out.splitlines()) == 1
    assert (model / "model.safetensors").read_bytes() == (home / "again/model.safetensors").read_bytes()


def test_the_folder_holds_the_averaged_model_when_asked(model: Path, home: Path, image_folder: Path) -> None:
    facts = json.loads((model / "config.json").read_text())
    run = RunFolder.open(home / "runs" / facts["run"])
    assert sorted(p.name for p in model.iterdir()) == sorted(FILES) and facts["checkpoint"] == "swad"
    files = sorted(image_folder.rglob("*.png"))[:6]
    plain = [p.probabilities for p in load_run(run.path, "swad").predict(files)]  # type: ignore[union-attr]
    found = [p.probabilities for p in load_predictor(model).predict(files)]  # type: ignore[union-attr]
    tempered = np.stack(plain) ** (1 / facts["temperature"])
    np.testing.assert_allclose(np.stack(found), tempered / tempered.sum(1, keepdims=True), atol=1e-5)
    for fold in facts["folds"]:
        tests = RunFolder.open(home / "runs" / fold["run"]).records("test")
        assert fold["accuracy"] == next(t for t in tests if t["checkpoint"] == "swad")["all"]["accuracy"]


def test_one_site_left_out(image_folder: Path, home: Path, model: Path, capsys: Captured) -> None:
    words = ["fit", str(image_folder), "--out", str(home / "one"), "--runs", str(home / "runs"), *CHEAP]
    capsys.readouterr()
    assert main([*words, "--unseen", "field", "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not err and found["model"] == str(home / "one") and found["data"]["unseen"] == "field"
    assert list(found["expected"]["folds"]) == ["field"] and found["expected"]["interval"] is None
    assert "One site gives no interval" in (home / "one/README.md").read_text()


def test_without_folds(image_folder: Path, home: Path, model: Path, capsys: Captured) -> None:
    words = ["fit", str(image_folder), "--out", str(home / "quick"), "--runs", str(home / "runs"), *CHEAP]
    capsys.readouterr()
    assert main([*words, "--no-expect", "--no-with-backbone"]) == 0
    assert "not known (--no-expect)" in capsys.readouterr().out
    small, whole = ((folder / "model.safetensors").stat().st_size for folder in (home / "quick", model))
    assert small < whole / 2
    assert json.loads((home / "quick/config.json").read_text())["backbone"]["included"] is False


# Which method


def left_out_runs(home: Path, method: str) -> list[RunFolder]:
    """The runs that left a site out with a method, in the order of the sites."""
    runs = [RunFolder.open(file.parent) for file in home.glob("runs/*/done")]
    found = [run for run in runs if run.config.method == method and run.config.unseen != "none"]
    return sorted(found, key=lambda run: run.config.unseen)


def plant(home: Path, method: str, right: float) -> None:
    """Let this share of the images of every left-out site be right."""
    for run in left_out_runs(home, method):
        saved = read_predictions(run.path, "swad")
        assert saved is not None and len(saved.label) == 30
        wrong = np.where(np.arange(30) < 30 * right, saved.label, (saved.label + 1) % 3)
        save_predictions(run.path, "swad", saved._replace(probabilities=np.eye(3, dtype=np.float32)[wrong]), CLASSES)


def test_two_methods_are_compared_and_the_better_one_is_kept(
    model: Path, image_folder: Path, home: Path, capsys: Captured
) -> None:
    words = ["fit", str(image_folder), "--out", str(home / "two"), "--runs", str(home / "runs"), *CHEAP]
    words += ["--methods", "lp-ln", "patchgen-select"]
    capsys.readouterr()
    assert main(words) == 0
    err = capsys.readouterr().err
    assert (
        "7 trainings: 3 sites left out in turn with each of 2 methods (lp-ln, patchgen-select), then the better one on "
        f"all sites; 4 finished in {home / 'runs'}"  # those of one method are found again
    ) in err
    assert err.index("this will take about") < err.index("training 1 of 7") and err.count("backbone: ") == 1
    assert "training 4 of 7: patchgen-select without clinic, to be scored on it; finished earlier" in err
    choice = json.loads((home / "two/config.json").read_text())["choice"]
    for method in ("lp-ln", "patchgen-select"):  # image by image as it was recorded
        for run in left_out_runs(home, method):
            accuracy = next(r for r in run.records("test") if r["checkpoint"] == "swad")["all"]["accuracy"]
            assert choice["accuracy"][method][run.config.unseen] == pytest.approx(accuracy)

    plant(home, "lp-ln", 0.2)
    plant(home, "patchgen-select", 0.9)
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == result["choice"]["chosen"] == "patchgen-select"
    assert result["choice"]["comparisons"][0]["shown"] and result["folds"][0]["confidence"] == [1.0] * 21
    assert {fold["method"] for fold in result["folds"]} == {"patchgen-select"}
    card = (home / "two/README.md").read_text()
    for text in (
        "## How the method was chosen", "2 methods were compared, simplest first: `lp-ln` and `patchgen-select`",
        "| clinic | 0.200 | 0.900 | patchgen-select |", "patchgen-select is better.", "corrected for this choice",
    ):  # fmt: skip
        assert text in card

    plant(home, "patchgen-select", 0.2)  # the very same images: no advantage
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "kept: lp-ln" in out and "no advantage shown" in out and "+0.0 points" in err
    assert json.loads((home / "two/config.json").read_text())["settings"]["method"] == "lp-ln"


def test_runs_without_predictions_predict_again(model: Path, image_folder: Path, home: Path) -> None:
    run = left_out_runs(home, "patchgen-select")[0]
    fold = make_fold(run.config)
    (run.path / "swad_predictions.safetensors").unlink()
    again = predictions_at(run, fold, "swad")
    accuracy = next(r for r in run.records("test") if r["checkpoint"] == "swad")["all"]["accuracy"]
    assert (again.probabilities.argmax(1) == again.label).mean() == pytest.approx(accuracy)
    saved = read_predictions(run.path, "swad")
    assert saved is not None and np.array_equal(saved.rows, rows_of(fold))


# Less time


def test_a_quick_model_is_a_model(image_folder: Path, home: Path, tmp_path: Path, capsys: Captured) -> None:
    words = ["fit", str(image_folder), "--out", str(tmp_path / "quick"), "--runs", str(home / "runs"), *QUICK]
    assert main([*words, "--quick"]) == 0
    out, err = capsys.readouterr()
    assert "expected accuracy at a new site: 0." in out and "4 trainings" in err and err.count("tokens of") == 3  # once
    settings = json.loads((tmp_path / "quick/config.json").read_text())["settings"]
    assert (settings["method"], settings["tune"], settings["augment"]) == (BEST, "upper-layernorm", False)
    assert "**A quick model**" in (tmp_path / "quick/README.md").read_text()
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "quick"), str(image_folder / "field/cross/00.png")]) == 0
    assert main(["explain", str(tmp_path / "quick"), str(image_folder / "field/cross/00.png"), "--out",
                 str(tmp_path / "maps")]) == 0  # fmt: skip
    file = image_folder / "field/cross/00.png"
    (whole,) = load_predictor(tmp_path / "quick").predict([file])
    (trained,) = load_run(left_out_runs(home, BEST)[0].path).predict([file])
    assert whole.probabilities.shape == trained.probabilities.shape == (3,)  # type: ignore[union-attr]


@pytest.mark.parametrize("stops", [True, False])
def test_a_long_fit_offers_its_quick_model(
    stops: bool, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(procedure, "QUICK_FROM", 0)
    monkeypatch.setattr(procedure, "LONG", 0)
    monkeypatch.setitem(procedure.PRESETS, "quick", {**procedure.PRESETS["quick"], "steps": 2, "image_size": 56})
    offers: list[str] = []
    config = Config(str(image_folder), "none", method="lp", backbone="tiny", image_size=56, steps=3, augment=False)
    model = procedure.fit(config, tmp_path, stop_at_quick=lambda offer: offers.append(offer) or stops)
    err = capsys.readouterr().err
    assert len(offers) == 1 and offers[0].startswith("quick model: 0.") and offers[0] in err
    assert "--quick for a first model" in err and "--minutes 20" in err
    assert model.predictor.config.tune == ("upper-layernorm" if stops else None)
    assert len(list(tmp_path.glob("*/done"))) == (4 if stops else 7)


def make_plan(image_folder: Path, **changes: object) -> Plan:
    names = ("lp-ln", "patchgen", BEST)
    usual = {"backbone": "tiny", "image_size": 112, "steps": 150, "batch_per_domain": 12, "val_images": 4, **changes}
    configs = [Config(str(image_folder), "none", method=name, **usual) for name in names]  # type: ignore[arg-type]
    return procedure._plan(configs, image_folder.parent / "no-runs", True, True, True)


def test_a_budget_gives_up_methods_then_steps_then_all_but_quick(image_folder: Path) -> None:
    plan = make_plan(image_folder)
    rates = dict.fromkeys(plan.candidates, Rate(step=0.01, forward=0.002, build=2.0))
    # by hand: 3 x (150 steps x 24 images + final 150 x 36), evaluations and tests on 8 or 12 images, calibration on 90
    counted = replace(plan, candidates={"lp-ln": plan.candidates["lp-ln"]})
    steps, evaluations = 150 * 12 * (3 * 2 + 3), 2 * (3 * 8 + 12)
    by_hand = 4 * 2.0 + 0.01 * steps + 0.002 * (evaluations + 3 * 30 + 90)
    assert estimate(counted, rates) == pytest.approx(by_hand, rel=0.01)
    whole = estimate(plan, rates)
    assert within(plan, rates, whole / 60 + 0.1, frozenset())[0] is plan
    alone, note = within(plan, rates, whole / 120, frozenset())
    assert list(alone.candidates) == [BEST] and note == f"{BEST} alone, nothing is compared"
    shorter, note = within(plan, rates, estimate(alone, rates) / 60 * 0.6, frozenset())
    assert 60 <= shorter.first.steps < 150 and estimate(shorter, rates) <= estimate(alone, rates) * 0.6
    assert f"{shorter.first.steps} steps" in note
    assert within(plan, rates, 0.1, frozenset())[0].first.tune == "upper-layernorm"
    kept, note = within(plan, rates, 0.1, frozenset({"methods", "steps", "tune"}))
    assert list(kept.candidates) == list(plan.candidates) and kept.first.steps == 150 and "longer" in note
    large, note = within(make_plan(image_folder, image_size=224), rates, estimate(alone, rates) / 120, frozenset())
    assert large.first.image_size == 112 and "112 px" in note


# One site, and folders that are none


def test_one_site(image_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    words = ["fit", str(image_folder / "field"), "--out", str(tmp_path / "m"), "--runs", str(tmp_path / "runs"), *QUICK]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "expected accuracy at a new site: not known (only one site)" in out and "1 training: " in err
    assert "one site, field: no accuracy at a new site can be estimated" in err
    assert "all images come from one site, field" in (tmp_path / "m/README.md").read_text()


def test_what_doctor_would_say(image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = shutil.copytree(image_folder, tmp_path / "photos")
    shutil.rmtree(photos / "field/cross")
    for file in sorted((photos / "studio/circle").iterdir())[3:]:
        file.unlink()
    (photos / "runs/4f2a/checkpoints").mkdir(parents=True)
    (photos / "runs/4f2a/config.yaml").touch()
    lines: list[str] = []
    replace(make_plan(photos), say=lines.append).announce()
    text = "\n".join(lines)
    assert "data: missing classes: field lacks cross" in text and "tiny classes: studio/circle (3)" in text
    assert "data: ignored runs: runs and models, not images of a site" in text


def test_tracking_reaches_every_training(image_folder: Path, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    words = ["fit", str(image_folder), "--out", str(tmp_path / "m"), "--runs", str(tmp_path / "runs"), *CHEAP]
    assert main([*words, "--track", "--method", "lp", "--no-augment", "--unseen", "field"]) == 0
    assert len(list(tmp_path.glob("runs/*/tensorboard/events.*"))) == 1


# Patients


@pytest.fixture(scope="module")
def tiles(image_folder: Path, home: Path) -> Path:
    """A manifest of the shared images with five patients a site."""
    files = sorted(image_folder.rglob("*.png"))
    rows = [f"{f},{f.parts[-3]},{f.parts[-2]},{f.parts[-3]}-{int(f.stem) % 5}" for f in files]
    (home / "tiles.csv").write_text("\n".join(["path,domain,label,group", *rows]))
    return home / "tiles.csv"


@pytest.mark.parametrize(
    ("given", "split", "stays", "warns"),
    [([], "group", 1, 0), (["--split", "group"], "group", 0, 0), (["--split=domainbed"], "domainbed", 0, 1)],
)
def test_named_groups_decide_the_split_unless_it_is_given(
    given: list[str], split: str, stays: int, warns: int, tiles: Path, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = ["fit", str(tiles), "--out", str(tmp_path / "model"), "--runs", str(home / "runs"), *CHEAP, "--no-expect"]
    capsys.readouterr()
    assert main([*words, "--json", *given]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["data"]["split"] == split
    assert err.count("patients stay together: --split group, because the manifest names groups\n") == stays
    assert err.count("Keep patients together with --split group\n") == warns


def test_all_unreadable_images_are_listed_before_any_training(
    image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = shutil.copytree(image_folder, tmp_path / "photos")
    for name in ("field/cross/03.png", "studio/circle/01.png"):
        (folder / name).write_bytes((folder / name).read_bytes()[:200])
    (folder / "field/cross/notes.txt").write_text("hello")
    assert main(["fit", str(folder), "--out", str(tmp_path / "m"), "--runs", str(tmp_path / "runs"), *CHEAP]) == 2
    err = capsys.readouterr().err
    assert "2 of 90 images cannot be read; repair, replace or remove" in err
    assert "\n  field/cross/03.png: " in err and "\n  studio/circle/01.png: " in err
    assert "1 file skipped, no image by the ending: 1 .txt (such as field/cross/notes.txt)" in err
    assert "training 1" not in err and not (tmp_path / "runs").exists() and not (tmp_path / "m").exists()


# A model folder in the other commands


def test_predictions_of_a_model_say_what_is_unlike(
    model: Path, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    capsys.readouterr()
    known = str(image_folder / "field/cross/00.png")
    assert main(["predict", str(model), known, str(tmp_path / "noise.png"), "--csv", "-"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0])[:4] == ["path", "label", "confidence", "unlike_training"]
    assert [row["unlike_training"] for row in rows] == ["false", "true"]
    assert main(["predict", str(model), known, str(tmp_path / "noise.png")]) == 0
    assert [line.endswith("unlike the training images") for line in capsys.readouterr().out.splitlines()] == [
        False, False, True]  # fmt: skip


def test_an_evaluation_says_which_checkpoint_a_model_is(
    model: Path, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = ["evaluate", str(model), str(image_folder / "studio"), "--out", str(tmp_path), "--resamples", "0"]
    assert main([*words, "--wrong", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["checkpoint"], found["model"], found["images"]["scored"]) == ("swad", "model", 30)


@pytest.mark.parametrize("words", [["diagnose", "{model}"], ["discover", "{model}", "{images}"]])
def test_a_model_folder_where_a_run_is_needed_is_named_as_one(
    words: list[str], model: Path, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    given = [word.format(model=model, images=image_folder) for word in words]
    assert main([*given, "--out", str(tmp_path / "found")]) == 2
    assert "it is a model folder: use a run of its fit" in capsys.readouterr().err


# Runs that leave nothing out


def test_a_run_on_all_domains_scores_nothing(model: Path, home: Path, capsys: Captured) -> None:
    run = RunFolder.open(home / "runs" / json.loads((model / "config.json").read_text())["run"])
    assert run.config.unseen == "none" and not run.records("test") and run.done
    text = (run.path / "summary.md").read_text()
    assert text.startswith("# patchgen-select on all domains") and "Do not expect this accuracy at a new domain" in text
    [chosen] = [r for r in run.records("evaluation") if f"at step {r['step']}:" in text]
    for name, found in chosen["validation"].items():
        assert re.search(rf"\| {name} +\| {found['accuracy']:.4f} +\| {found['images']} +\|", text)
    assert main(["diagnose", str(run.path)]) == 2
    assert "trained on all domains" in capsys.readouterr().err


def test_a_domain_called_none_can_still_be_left_out(image_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(image_folder, tmp_path / "photos")
    (folder / "field").rename(folder / "none")
    fold = make_fold(Config(str(folder), "none"))
    assert set(fold.validation) == {"clinic", "studio"} and len(fold.test["in"]) == 24

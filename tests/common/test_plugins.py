"""What is written outside the package is trained, found again, swept and predicted with, each in a fresh process."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patchgen.common import plugins
from patchgen.config import Config
from patchgen.methods import METHODS
from patchgen.model.backbone import BACKBONES, load_backbone
from patchgen.runs.folder import run_name

GUIDE = (Path(__file__).parents[2] / "docs" / "study" / "methods.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[0]
WORDS = "--backbone tiny --image-size 56 --steps 3 --eval-every 2 --batch-per-domain 4 --val-images 4 --quiet"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads into this process is taken out again."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv(plugins.VARIABLE, "")
    before = {group: set(plugins.table_of(group)) for group in plugins.GROUPS}
    yield
    for group, names in before.items():
        for key in set(plugins.table_of(group)) - names:
            del plugins.table_of(group)[key]


@pytest.mark.slow
def test_in_fresh_processes(tmp_path: Path, image_folder: Path) -> None:
    """Trained, found again without being told; elsewhere it is missing, and the folder's own code never runs."""
    (tmp_path / "center.py").write_text(EXAMPLE, encoding="utf-8")

    def patchgen(words: str, cache: str = "cache") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATCHGEN_CACHE": str(tmp_path / cache), plugins.VARIABLE: ""}
        command = [sys.executable, "-P", "-m", "patchgen", *words.split()]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = patchgen(f"train {image_folder} --unseen studio --method patchgen+center {WORDS} --plugin center.py")
    assert done.returncode == 0, done.stderr
    run, [image, *_] = tmp_path / done.stdout.strip(), sorted(image_folder.rglob("*.png"))
    assert json.loads((run / "env.json").read_text())["plugins"][0]["name"] == "center.py"
    done = patchgen(f"predict {run} {image}")
    assert done.returncode == 0 and image.name in done.stdout, done.stderr
    (run / "center.py").write_text("raise SystemExit('ran')")
    done = patchgen(f"predict {run} {image}", cache="other")
    assert done.returncode == 2 and "--plugin FILE.py" in done.stderr
    assert patchgen(f"predict {run} {image} --plugin=center.py", cache="other").returncode == 0


def test_a_recorded_file_is_found_again_and_elsewhere_it_is_named(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "center.py").write_text(EXAMPLE, encoding="utf-8")
    version = plugins.load(tmp_path / "center.py").version
    recorded = plugins.used_by(Config("d", "u", method="patchgen+center"))
    assert recorded == [{"name": "center.py", "version": version}] and len(version) == 64
    for cache in ("cache", "other"):
        monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / cache))
        plugins._loaded.clear()
        del METHODS["center"]
        if cache == "cache":
            plugins.require(recorded, "run")
            assert "center" in METHODS
    with pytest.raises(ValueError, match=rf"plug-in center.py .sha256 {version[:12]}\.\.\.\).*--plugin FILE.py"):
        plugins.require(recorded, "run")


@pytest.mark.parametrize(("text", "reason"), [
    ("1 / 0", "fails: ZeroDivisionError"),
    ("from patchgen.methods import METHODS, Method\nMETHODS['lp'] = Method", "uses the name 'lp'"),
])  # fmt: skip
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

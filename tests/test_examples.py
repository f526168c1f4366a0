"""The examples keep their word: each runs as a person would run it, with settings that take seconds."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import patchgen
from patchgen.cli import main
from patchgen.methods import METHODS

EXAMPLES = Path(__file__).parents[1] / "examples"
CHEAP = ["--backbone", "tiny", "--image-size", "56", "--steps", "2"]
Run = Callable[..., str]
TinyRun = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("name", *words)` is `python examples/name.py WORDS...` in an empty folder; gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_called(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"\npython examples/{path.name}" in text.split('"""')[1]
    assert f"def test_{path.stem}" in Path(__file__).read_text(encoding="utf-8"), "an example that no test runs"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.stem)
def test_an_example_imports_public_names_only(path: Path) -> None:
    public = set(re.findall(r"^::: (\S+)", (EXAMPLES.parent / "docs/develop/api.md").read_text(encoding="utf-8"), re.M))
    public |= {f"patchgen.{name}" for name in patchgen.__all__}
    text = "\n".join(cells("code")) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("patchgen"):
            assert {f"{node.module}.{name.name}" for name in node.names} <= public


ONLY_CORE = """
import runpy, sys
blocked = ["timm", "torchvision", "peft", "onnx", "openvino", "fastapi", "tensorboard", "wandb"]
sys.modules.update(dict.fromkeys(blocked))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WORDS = {
    "fit_and_predict": ["{photos}", "{photos}/studio/cross", *CHEAP],
    "own_arrays": ["--count", "72", *CHEAP],
    "own_method": ["{photos}", "--unseen", "studio", *CHEAP],
    "sweep_from_python": ["{photos}", "--seeds", "1", *CHEAP],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_in_a_process_of_its_own_with_the_core_alone(name: str, image_folder: Path, tmp_path: Path) -> None:
    words = [word.format(photos=image_folder) for word in WORDS[name]]
    command = [sys.executable, "-c", ONLY_CORE, str(EXAMPLES / f"{name}.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_fit_and_predict(run: Run, image_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for i, file in enumerate(sorted(image_folder.rglob("*.png"))[:3]):
        (tmp_path / "new" / f"{i}.png").write_bytes(file.read_bytes())
    (tmp_path / "new" / "broken.png").write_bytes(b"no picture")
    out = run("fit_and_predict", image_folder, "new", *CHEAP)
    assert re.search(r"expected accuracy at a new site: 0\.\d+ \(95 % t-intervals over 3 sites", out)
    assert len(re.findall(r"^new/\d\.png\t(circle|cross|square)\t0\.\d\d", out, re.MULTILINE)) == 3
    assert "new/broken.png\tunreadable: " in out
    assert (tmp_path / "photos-model" / "model.safetensors").is_file()


def test_own_loop(run: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    assert "from patchgen" not in text and "import patchgen\n" in text  # public names only
    out = run("own_loop", "--backbone", "tiny", "--size", "56", "--steps", "3")
    assert re.fullmatch(r"loss -?\d\.\d{3}, mean mask 0\.\d\d\n", out)
    with Image.open(tmp_path / "map.png") as picture:
        assert len(np.unique(np.asarray(picture))) > 50  # image and colours, not a blank page


def test_explain_one_image(run: Run, image_folder: Path, tmp_path: Path, tiny_run: TinyRun) -> None:
    out = run("explain_one_image", tiny_run().path, image_folder / "studio/cross/00.png")
    assert Image.open(tmp_path / "map.png").width > 500
    assert {"highest", "lowest", "random"} == set(re.findall(r"without the (\w+) half of the patches", out))


def test_explain_one_image_takes_the_right_pixels_away() -> None:
    without = runpy.run_path(str(EXAMPLES / "explain_one_image.py"))["without"]
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2] = 100
    left = without(image, np.array([[True, False], [False, False]]))
    assert (left[:2, :2] == 50).all() and (left[:2, 2:] == 100).all() and (left[2:] == 0).all()


def test_own_method(run: Run, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "small-logits", METHODS["lp-ln"])  # so that it is taken out again
    out = run("own_method", image_folder, "--unseen", "studio", *CHEAP)
    plain, added = out.splitlines()
    assert plain.startswith("patchgen: 0.") and "L_small" not in plain
    assert added.startswith("patchgen+small-logits: 0.") and re.search(r"'L_small': 0\.\d*[1-9]", added)


def test_own_arrays(run: Run) -> None:
    out = run("own_arrays", "--count", 72, *CHEAP)
    assert "95 % t-intervals over 3 sites" in out and "classes: lying standing" in out
    assert re.search(r"accuracy on further images of these sites: [01]\.\d", out)


def test_sweep_from_python(run: Run, image_folder: Path) -> None:
    words = (image_folder, *CHEAP, "--seeds", 1)
    out = run("sweep_from_python", *words)
    assert out.count("(waiting)") == 6 and "failed" not in out
    header, _, *rows = out.splitlines()[-4:]
    assert header.split() == ["unseen", "clinic", "field", "studio", "mean"]
    assert [row.split()[0] for row in rows] == ["lp-ln", "patchgen"]
    again = run("sweep_from_python", *words)
    assert again.count("(done)") == 6 and again.splitlines()[-4:] == out.splitlines()[-4:]


def test_onnx_inference(run: Run, image_folder: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    for needed in ("onnxruntime", "onnxscript"):
        pytest.importorskip(needed, reason="the extra `export` is not installed")
    path, image = tiny_run().path, image_folder / "studio/cross/00.png"
    assert main(["export", str(path), "--out", "model.onnx", "--count", "2"]) == 0
    [line] = run("onnx_inference", "model.onnx", image).splitlines()
    _, label, confidence, level = line.split("\t")
    assert main(["predict", str(path), str(image), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert label == found["label"] and float(confidence) == pytest.approx(found["confidence"], abs=1e-3)
    assert level.startswith("mask mean 0.")


def cells(kind: str) -> list[str]:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_stores_no_output() -> None:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"NOTEBOOK": str(tmp_path / "notebook"), "BACKBONE": "tiny", "STEPS": "2", "PER_CLASS": "5"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PATCHGEN_{name}", value)
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, source in enumerate(cells("code"), 1):
        exec(compile(source, f"quickstart.ipynb, code cell {number}", "exec"), namespace)
    out = capsys.readouterr().out
    assert "accuracy at mist: {'mist': 0." in out and "AUROC 0." in out
    assert out.splitlines()[-1] == "README.md config.json model.safetensors"
    assert (tmp_path / "notebook" / "map.png").is_file()


def test_the_notebook_names_pages_that_exist() -> None:
    pages = re.findall(r"`(docs/[\w/-]+\.md)`", "\n".join(cells("markdown")))
    assert pages and all((EXAMPLES.parent / page).is_file() for page in pages)

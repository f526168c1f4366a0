"""The examples keep their word: each runs as a person would run it, in a process of its own without the extras."""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import patchgen
from patchgen.cli import main

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CHEAP = ["--backbone", "tiny", "--image-size", "56", "--steps", "2"]
IMPORTED = {"umap-learn": "umap", "python-multipart": "multipart", "openslide-python": "openslide",
            "openslide-bin": "openslide_bin", "mlflow-skinny": "mlflow", "pillow-heif": "pillow_heif"}  # fmt: skip
WITHOUT = """
import json, os, runpy, sys, traceback
from importlib.machinery import PathFinder
blocked = sys.argv[1].split()
class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
import patchgen.fit.estimator, patchgen.train.fold  # imported once for all examples
for line in sys.stdin:
    folder, environment, *sys.argv = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.environ.update(environment)
    for number, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
"""
Run = Callable[..., str]
TinyRun = Callable[..., SimpleNamespace]


def extras() -> list[str]:
    """Names of the modules that only extras install."""
    of = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = [re.match(r"[\w-]+", one) for name in of.keys() - {"all", "dev", "docs"} for one in of[name]]
    names = {found[0] for found in wanted if found} - {"patchgen"}
    return sorted({"torchvision", *(IMPORTED.get(name, name) for name in names)})


@pytest.fixture(scope="module")
def core() -> Iterator[subprocess.Popen[str]]:
    """A process without the extras that forks for every example."""
    command = [sys.executable, "-c", WITHOUT, " ".join(extras())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def run(core: subprocess.Popen[str], tmp_path: Path) -> Run:
    """`run("name.py", *words)` is `python examples/name.py WORDS...` in an empty folder; gives what it printed."""

    def call(script: str | Path, *words: object, **environment: str) -> str:
        assert core.stdin and core.stdout
        core.stdin.write(json.dumps([str(tmp_path), environment, str(EXAMPLES / script), *map(str, words)]) + "\n")
        core.stdin.flush()
        assert core.stdout.readline() == "0\n", (tmp_path / "stderr").read_text()
        return (tmp_path / "stdout").read_text()

    return call


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_called(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"\npython examples/{path.name}" in text.split('"""')[1]
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8"), "an example that no test runs"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.stem)
def test_an_example_imports_public_names_only(path: Path) -> None:
    public = set(re.findall(r"^::: (\S+)", (ROOT / "docs/develop/api.md").read_text(encoding="utf-8"), re.M))
    public |= {f"patchgen.{name}" for name in patchgen.__all__}
    text = "\n".join(cells("code")) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("patchgen"):
            assert {f"{node.module}.{name.name}" for name in node.names} <= public


def test_extras_are_blocked(run: Run, tmp_path: Path) -> None:
    lines = "import importlib.util, sys\nprint(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
    (tmp_path / "installed.py").write_text(lines)
    assert {"timm", "onnxruntime", "fastapi", "peft", "pyarrow", "openslide"} <= set(extras())
    assert run(tmp_path / "installed.py", "numpy", *extras()) == "numpy\n"


def test_fit_and_predict(run: Run, image_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for i, file in enumerate(sorted(image_folder.rglob("*.png"))[:3]):
        (tmp_path / "new" / f"{i}.png").write_bytes(file.read_bytes())
    (tmp_path / "new" / "broken.png").write_bytes(b"no picture")
    out = run("fit_and_predict.py", image_folder, "new", *CHEAP)
    assert re.search(r"expected accuracy at a new site: 0\.\d+ \(95 % t-intervals over 3 sites", out)
    assert len(re.findall(r"^new/\d\.png\t(circle|cross|square)\t0\.\d\d", out, re.MULTILINE)) == 3
    assert "new/broken.png\tunreadable: " in out
    assert (tmp_path / "photos-model" / "model.safetensors").is_file()


def test_own_loop(run: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    assert "from patchgen" not in text and "import patchgen\n" in text  # public names only
    out = run("own_loop.py", "--backbone", "tiny", "--size", "56", "--steps", "3")
    assert re.fullmatch(r"loss -?\d\.\d{3}, mean mask 0\.\d\d\n", out)
    with Image.open(tmp_path / "map.png") as picture:
        assert len(np.unique(np.asarray(picture))) > 50  # image and colours, not a blank page


def test_explain_one_image(run: Run, image_folder: Path, tmp_path: Path, tiny_run: TinyRun) -> None:
    out = run("explain_one_image.py", tiny_run().path, image_folder / "studio/cross/00.png")
    assert Image.open(tmp_path / "map.png").width > 500
    assert {"highest", "lowest", "random"} == set(re.findall(r"without the (\w+) half of the patches", out))


def test_explain_one_image_takes_the_right_pixels_away() -> None:
    without = runpy.run_path(str(EXAMPLES / "explain_one_image.py"))["without"]
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2] = 100
    left = without(image, np.array([[True, False], [False, False]]))
    assert (left[:2, :2] == 50).all() and (left[:2, 2:] == 100).all() and (left[2:] == 0).all()


def test_own_method(run: Run, image_folder: Path) -> None:
    plain, added = run("own_method.py", image_folder, "--unseen", "studio", *CHEAP).splitlines()
    assert plain.startswith("patchgen: 0.") and "L_small" not in plain
    assert added.startswith("patchgen+small-logits: 0.") and re.search(r"'L_small': 0\.\d*[1-9]", added)


def test_own_arrays(run: Run) -> None:
    out = run("own_arrays.py", "--count", 72, *CHEAP)
    assert "95 % t-intervals over 3 sites" in out and "classes: lying standing" in out
    assert re.search(r"accuracy on further images of these sites: [01]\.\d", out)


def test_sweep_from_python(run: Run, image_folder: Path) -> None:
    words = (image_folder, *CHEAP, "--seeds", 1)
    out = run("sweep_from_python.py", *words)
    assert out.count("(waiting)") == 6 and "failed" not in out
    header, _, *rows = out.splitlines()[-4:]
    assert header.split() == ["unseen", "clinic", "field", "studio", "mean"]
    assert [row.split()[0] for row in rows] == ["lp-ln", "patchgen"]
    again = run("sweep_from_python.py", *words)
    assert again.count("(done)") == 6 and again.splitlines()[-4:] == out.splitlines()[-4:]


def test_onnx_inference(image_folder: Path, tmp_path: Path, tiny_run: TinyRun,
                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    for needed in ("onnxruntime", "onnxscript"):
        pytest.importorskip(needed, reason="the extra `export` is not installed")
    path, image = tiny_run().path, image_folder / "studio/cross/00.png"
    assert main(["export", str(path), "--out", str(tmp_path / "model.onnx"), "--count", "2"]) == 0
    [line] = subprocess.run(
        [sys.executable, EXAMPLES / "onnx_inference.py", tmp_path / "model.onnx", image],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ""},
    ).stdout.splitlines()  # fmt: skip
    _, label, confidence, level = line.split("\t")
    capsys.readouterr()
    assert main(["predict", str(path), str(image), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert label == found["label"] and float(confidence) == pytest.approx(found["confidence"], abs=1e-3)
    assert level.startswith("mask mean 0.")


def cells(kind: str) -> list[str]:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    stored = [cell.get("outputs", []) or cell.get("execution_count") for cell in notebook["cells"]]
    assert notebook["nbformat"] == 4 and not any(stored)
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_runs(run: Run, tmp_path: Path) -> None:
    settings = {"NOTEBOOK": str(tmp_path / "notebook"), "BACKBONE": "tiny", "STEPS": "2", "PER_CLASS": "5"}
    (tmp_path / "cells.py").write_text("\n".join(cells("code")), encoding="utf-8")
    out = run(tmp_path / "cells.py", **{f"PATCHGEN_{name}": value for name, value in settings.items()})
    assert "accuracy at mist: {'mist': 0." in out and "AUROC 0." in out
    assert out.splitlines()[-1] == "README.md config.json model.safetensors"
    assert (tmp_path / "notebook" / "map.png").is_file()


def test_the_notebook_names_pages_that_exist() -> None:
    pages = re.findall(r"`(docs/[\w/-]+\.md)`", "\n".join(cells("markdown")))
    assert pages and all((ROOT / page).is_file() for page in pages)

"""`make setup` on a machine whose torch brings CUDA packages, as a plain `pip install torch` does on Linux."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BACKEND = """
import zipfile

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "patchgen-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("patchgen-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: patchgen\\nVersion: 1\\n"
                       "Requires-Dist: torch\\nProvides-Extra: all\\nProvides-Extra: dev\\nProvides-Extra: docs\\n")
        wheel.writestr("patchgen-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any")
        wheel.writestr("patchgen-1.dist-info/RECORD", "")
    return name
"""


def write_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """An empty wheel, with one requirement."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("installed", [None, "8.0"], ids=["no torch", "a torch of the user's"])
def test_setup_accepts_a_cuda_build_of_torch_and_keeps_an_installed_one(installed: str | None, tmp_path: Path) -> None:
    wheels, checkout = tmp_path / "wheels", tmp_path / "checkout"
    write_wheel(wheels, "torch", "8.0", requires="nvidia-cublas")
    write_wheel(wheels, "torch", "9.0", requires="nvidia-cublas")
    write_wheel(wheels, "nvidia_cublas", "1.0")
    checkout.mkdir()
    shutil.copy(ROOT / "Makefile", checkout)
    (checkout / "constraints.txt").write_text("torch==9.0\n")
    (checkout / "backend.py").write_text(BACKEND)
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}

    def run(*words: str) -> None:
        result = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr

    if installed:
        run(sys.executable, "-m", "venv", ".venv")
        run(".venv/bin/python", "-m", "pip", "install", f"torch=={installed}")
    run("make", "setup", f"PYTHON={sys.executable}")
    packages = {path.stem for path in checkout.glob(".venv/lib/python*/site-packages/*.dist-info")}
    assert {f"torch-{installed or '9.0'}", "nvidia_cublas-1.0", "patchgen-1"} <= packages
    assert (checkout / ".venv/.ready").exists()


def test_recipes_use_no_gnu_only_flags() -> None:
    """macOS has BSD tools: no `sed -i` without a suffix, no `grep -P`, no long options of coreutils."""
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")]
    gnu = re.compile(r"\b(sed -i|grep -\w*P|readlink -f|date -d|stat -c|xargs -r|cp --|mkdir --|rm --|ln --)")
    assert not [line for line in recipes if gnu.search(line)]

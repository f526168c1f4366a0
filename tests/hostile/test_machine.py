"""Machines that are smaller than they announce, or than settings expect."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchgen.common import machine
from patchgen.common.child_process import child_environment, python
from patchgen.config import Config
from patchgen.train.lifecycle import train

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
HANGS = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    machine.bf16_works.cache_clear()
    yield
    machine.bf16_works.cache_clear()


def announce(text: str, product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {text}\n")
    monkeypatch.setattr(machine, "CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "PRODUCT", product)


def test_a_product_that_kills_its_process_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_settings: dict[str, Any]
) -> None:
    announce("amx_bf16 amx_tile", KILLED, tmp_path, monkeypatch)
    config = Config(**{**tiny_settings, "method": "lp", "precision": "bf16-mixed", "accelerator": "cpu"})
    with pytest.raises(ValueError, match="using it kills the process; use --precision 32-true, or set"):
        train(config, tmp_path / "runs", quiet=True)


@pytest.mark.parametrize(
    ("flags", "product", "works"),
    [("amx_bf16", HANGS, False), ("amx_bf16", machine.PRODUCT, True), ("avx512_bf16", KILLED, True)],
)  # only where AMX is announced anything is tried
def test_whether_bf16_works(
    flags: str, product: str, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(flags, product, tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "SECONDS", 0.5 if product == HANGS else machine.SECONDS)
    assert machine.bf16_works() == works


def test_settings_of_a_larger_machine_are_refused_and_resume_with_fewer_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    settings = {**tiny_settings, "method": "lp", "image_size": 28, "steps": 1, "swad": False, "accelerator": "cpu"}
    with pytest.raises(ValueError, match=r"threads must be at most 64 .* 2 cores\), not 65; give --threads 2, or none"):
        train(Config(**{**settings, "threads": 65}), tmp_path, quiet=True)
    run = train(Config(**{**settings, "threads": 1}), tmp_path, quiet=True)
    assert run.done and [path.name for path in tmp_path.iterdir()] == [run.path.name]


def test_more_threads_than_cores_are_used_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", used.append)
    monkeypatch.setattr(machine, "available_cores", lambda: 1)
    for count in (None, 1, 32):
        machine.use_threads(count)
    assert used == [1, 32]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of address space")
def test_threads_that_cannot_be_started_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Without the check OpenMP ends the process at the first large sum."""
    code = (
        "import resource, torch\nfrom patchgen.common import machine\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "machine.available_cores = lambda: 64\n"
        "try: machine.use_threads(1000)\nexcept ValueError as error: print(error)\n"
        "torch.rand(2000, 2000).sum()\nprint('alive')"
    )
    done = subprocess.run(python("-c", code), env=child_environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("1000 threads requested, but limits on memory or processes allow "), done.stderr
    assert done.stdout.endswith("alive\n")

"""`--precision auto`: native bfloat16 decides, before the run is named; a run keeps what it was begun with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.common import machine
from patchgen.config import Config
from patchgen.runs.folder import RunFolder, choose_precision, run_name, with_precision
from patchgen.train.lifecycle import train


def native(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    monkeypatch.setattr(machine, "native_bf16", lambda: wanted)


@pytest.mark.parametrize(("words", "works", "expected"), [
    ("fpu avx2", True, False), ("avx512f avx512_bf16", True, True), ("fp asimd bf16 i8mm", True, True),
    ("avx512_bf16x", True, False), ("avx512_bf16 amx_bf16", False, False), (None, True, False),
])  # fmt: skip
def test_native_bf16_needs_the_flag_and_a_working_kernel(
    words: str | None, works: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words:
        (tmp_path / "cpuinfo").write_text(f"flags : {words}\n")
    monkeypatch.setattr(machine, "CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "bf16_works", lambda: works)
    assert machine.native_bf16() is expected


@pytest.mark.parametrize(("has", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_the_device_decides_and_the_run_is_named_by_the_precision(
    has: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native(monkeypatch, has)
    config = Config("data", "sketch", precision="auto", accelerator="cpu")
    found = with_precision(config, tmp_path, "rows")
    assert found == replace(config, precision=expected)
    assert run_name(found, "rows") == run_name(replace(config, precision=expected), "rows")
    assert with_precision(replace(config, precision="32-true"), tmp_path, "rows").precision == "32-true"


def test_cuda_is_asked_for_native_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    native(monkeypatch, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not including_emulation)
    assert machine.computes_bf16("auto") and machine.computes_bf16("cuda")
    assert not machine.computes_bf16("cpu")


@pytest.mark.parametrize(("has", "begun"), [(True, "32-true"), (False, "bf16-mixed")])
def test_a_started_run_keeps_its_precision(
    has: bool, begun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native(monkeypatch, has)
    config = Config("data", "sketch", precision="auto", accelerator="cpu")
    early = replace(config, precision=begun)
    RunFolder.create(tmp_path, early, run_name(early, "rows"), "rows")
    assert with_precision(config, tmp_path, "rows").precision == begun
    assert choose_precision([replace(config, unseen="photo"), config], tmp_path, "rows") == begun
    own = replace(config, precision="bf16-mixed" if has else "32-true")
    RunFolder.create(tmp_path, own, run_name(own, "rows"), "rows")  # both were begun: the device's own
    assert with_precision(config, tmp_path, "rows").precision == own.precision


def test_training_with_auto_is_the_same_run_as_with_the_resolved_precision(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    native(monkeypatch, True)
    settings = {**tiny_settings, "method": "lp", "steps": 1, "swad": False, "accelerator": "cpu"}
    run = train(Config(**settings, precision="auto"), tmp_path)
    assert "precision: bf16-mixed, by `auto`" in capsys.readouterr().err
    assert run.config.precision == "bf16-mixed"
    native(monkeypatch, False)  # on another machine: the same run, not a new one
    assert train(Config(**settings, precision="auto"), tmp_path, quiet=True).path == run.path
    assert train(Config(**settings, precision="bf16-mixed"), tmp_path, quiet=True).path == run.path

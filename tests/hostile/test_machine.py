"""A CPU that announces what it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchgen.common import bf16
from patchgen.config import Config
from patchgen.train.lifecycle import train

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
HANGS = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    bf16.bf16_works.cache_clear()
    yield
    bf16.bf16_works.cache_clear()


def announce(text: str, product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {text}\n")
    monkeypatch.setattr(bf16, "CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(bf16, "PRODUCT", product)


def test_a_product_that_kills_its_process_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_settings: dict[str, Any]
) -> None:
    announce("amx_bf16 amx_tile", KILLED, tmp_path, monkeypatch)
    config = Config(**{**tiny_settings, "method": "lp", "precision": "bf16-mixed", "accelerator": "cpu"})
    with pytest.raises(ValueError, match="announces AMX and does not let it be used; take --precision 32-true, or set"):
        train(config, tmp_path / "runs", quiet=True)


def test_a_product_that_hangs_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce("amx_bf16", HANGS, tmp_path, monkeypatch)
    monkeypatch.setattr(bf16, "SECONDS", 0.5)
    assert not bf16.bf16_works()


def test_the_product_itself_works_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce("amx_bf16", bf16.PRODUCT, tmp_path, monkeypatch)
    assert bf16.bf16_works()


def test_nothing_is_tried_where_no_amx_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce("avx512_bf16", KILLED, tmp_path, monkeypatch)
    assert bf16.bf16_works()
    monkeypatch.setattr(bf16, "CPU", tmp_path / "nowhere")
    bf16.bf16_works.cache_clear()
    assert bf16.bf16_works()

"""Runs with a frozen prefix leave what runs without it leave, bit for bit, also when they were interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.config.stream import StreamConfig
from patchgen.model.prefix import Prefix
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors
from patchgen.train import evaluate
from patchgen.train.lifecycle import train
from patchgen.train.stream import loop as stream
from patchgen.train.stream.loop import StreamTrainer

SCHEDULE = "groups: [[circle, cross], [square]]\nratios: [[0.6, 1.0], [1.0]]\n"
CLOCK = ("seconds", "seconds_per_step")


@pytest.fixture(scope="module")
def settings(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    schedule = tmp_path_factory.mktemp("schedule") / "stages.yaml"
    schedule.write_text(SCHEDULE)
    return {
        "data": str(image_folder), "schedule": str(schedule), "backbone": "tiny", "image_size": 28, "epochs": 3,
        "batch": 8, "lr": 0.05, "warm_up": 1, "refit_every": 1, "val_every": 1, "projection_hidden": 16,
        "projection_bottleneck": 8, "projection_out": 32, "prompts": 2, "replay": 5, "holdout": 0.3, "inits": 2,
        "accelerator": "cpu",
    }  # fmt: skip


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many images passed a frozen part."""
    count = {"images": 0}
    whole = Prefix.before

    def before(self: Prefix, images: torch.Tensor) -> torch.Tensor:
        count["images"] += len(images)
        return whole(self, images)

    monkeypatch.setattr(Prefix, "before", before)
    return count


def plain(run: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in run.records()]


def same(one: RunFolder, other: RunFolder, checkpoints: list[str]) -> bool:
    """Equal records and tensors."""
    pairs = [[load_tensors(run.checkpoint(name))[0] for run in (one, other)] for name in checkpoints]
    tensors = all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)
    return plain(one) == plain(other) and tensors


STAGES = ["stage-0", "stage-1"]


@pytest.mark.parametrize("more", [{}, {"method": "gcd"}, {"method": "promptccd", "test_prompts": True}])
def test_a_stream_run_is_the_same_with_it(
    more: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: Any, passes: dict[str, int]
) -> None:
    config = StreamConfig(**settings, **more)
    kept = train(config, tmp_path / "kept", quiet=True)
    once = passes["images"]
    with monkeypatch.context() as patch:
        patch.setattr(stream, "MEMORY", 0)
        forgetful = train(config, tmp_path / "forgetful", quiet=True)
        again = passes["images"] - once
        patch.setattr(stream, "find_prefix", lambda *_: None)
        without = train(config, tmp_path / "without", quiet=True)
    assert 0 < once < again == passes["images"] - once
    assert same(kept, without, STAGES) and same(forgetful, without, STAGES)


def test_an_interrupted_stream_run_begins_with_an_empty_memory_and_ends_the_same(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    config, calls, whole = StreamConfig(**settings), [], StreamTrainer._step
    unbroken = train(config, tmp_path / "whole", quiet=True)

    def step(self: StreamTrainer, *args: Any) -> Any:
        calls.append(self.epoch)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return whole(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StreamTrainer, "_step", step)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "broken", quiet=True)
    assert calls[-1] > 0  # in a later epoch: something was in memory
    assert same(train(config, tmp_path / "broken", quiet=True), unbroken, STAGES)


@pytest.mark.parametrize("method", ["lp", "patchgen"])
def test_an_evaluation_is_the_same_with_it(
    method: str, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: Any, passes: dict[str, int]
) -> None:
    config = Config(**{**tiny_settings, "method": method, "tune": "last_block", "swad": False})
    kept = train(config, tmp_path / "kept", quiet=True)
    assert passes["images"] > 0
    monkeypatch.setattr(evaluate, "find_prefix", lambda *_: None)
    without = train(config, tmp_path / "without", quiet=True)
    names = sorted(path.stem for path in without.checkpoint("x").parent.glob("*.safetensors"))
    assert names and same(kept, without, names)

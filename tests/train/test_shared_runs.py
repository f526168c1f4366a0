"""Runs of one process share what they read, and compute the same bits as runs of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.common.reading import process_cache
from patchgen.config import Config
from patchgen.data.content import shared_table
from patchgen.model import backbone as backbones
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors
from patchgen.train.lifecycle import train


def numbers(run: RunFolder) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in run.records()]


def test_shared_runs_are_bit_equal_to_runs_alone(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = backbones._load
    monkeypatch.setattr(backbones, "_load", lambda source, *more: loads.append(source) or load(source, *more))
    start = Config(**{**tiny_settings, "steps": 3, "method": "lp-ln"})
    configs = [start, replace(start, method="patchgen-select"), replace(start, unseen="field")]
    with process_cache():
        shared = [
            train(one, tmp_path / "shared", shared_table(one.data, one.benchmark, one.options), quiet=True)
            for one in configs
        ]
    assert loads == ["tiny"]
    for config, run in zip(configs, shared, strict=True):
        alone = train(config, tmp_path / "alone", quiet=True)
        assert alone.path.name == run.path.name and numbers(alone) == numbers(run)
        for name in ("selected", "swad"):
            one, other = (load_tensors(each.checkpoint(name))[0] for each in (alone, run))
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert len(loads) == 4


def test_a_copy_has_weights_of_its_own_and_another_source_replaces_what_is_kept() -> None:
    with process_cache():
        one, other = backbones.load_backbone("tiny"), backbones.load_backbone("tiny")
        assert one.digest() == other.digest()
        with torch.no_grad():
            next(one.parameters()).add_(1)
        assert one.digest() != other.digest() == backbones.load_backbone("tiny").digest()


def test_a_backbone_with_hooks_is_loaded_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = backbones._load

    def hooked(source: str, *more: Any) -> backbones.Backbone:
        loads.append(source)
        found = load(source, *more)
        found.model.register_forward_hook(lambda module, inputs, output: None)
        return found

    monkeypatch.setattr(backbones, "_load", hooked)
    with process_cache():
        backbones.load_backbone("tiny")
        backbones.load_backbone("tiny")
    assert len(loads) == 3  # one is kept in vain

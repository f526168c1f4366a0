"""Runs of one process share what they read, and compute the same bits as runs of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchgen.common.reading import process_cache
from patchgen.config import Config
from patchgen.data.content import shared_table
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors
from patchgen.train.lifecycle import train


def numbers(run: RunFolder) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in run.records()]


def test_shared_runs_are_bit_equal_to_runs_alone(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    start = Config(**{**tiny_settings, "steps": 1, "method": "lp-ln"})
    configs = [start, replace(start, method="patchgen-select"), replace(start, unseen="field")]
    with process_cache():
        shared = [
            train(one, tmp_path / "shared", shared_table(one.data, one.benchmark, one.options), quiet=True)
            for one in configs
        ]
    for config, run in zip(configs, shared, strict=True):
        alone = train(config, tmp_path / "alone", quiet=True)
        assert alone.path.name == run.path.name and numbers(alone) == numbers(run)
        for name in ("selected", "swad"):
            one, other = (load_tensors(each.checkpoint(name))[0] for each in (alone, run))
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

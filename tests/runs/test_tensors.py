"""Files of tensors: what is written comes back, damage is noticed, and a full disk keeps the old file."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from patchgen.runs.tensors import load_tensors, save_tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def test_tensors_and_facts_round_trip(path: Path) -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    tensors = {"a": weight, "view": weight.T, "step": torch.tensor(7.0), "half": torch.ones(2, dtype=torch.bfloat16)}
    facts = {"classes": ["Öl", "b"], "grid": [4, 4], "best": -1e999, "swad": {"threshold": None}}
    save_tensors(path, tensors, facts)
    loaded, about = load_tensors(path)
    assert about == facts and loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.detach()) and loaded[name].dtype == tensor.dtype
        assert not loaded[name].requires_grad


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_refused_or_changes_nothing(path: Path) -> None:
    tensors, facts = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, {"step": 3, "best": -1e999}
    save_tensors(path, tensors, facts)
    content, refused = path.read_bytes(), 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        try:
            loaded, about = load_tensors(path)
        except ValueError as error:
            assert "state.safetensors is damaged" in str(error)
            refused += 1
        else:
            assert {name: about.get(name) for name in facts} == facts
            assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert refused > 0.8 * len(content)


def test_damaged_and_foreign_files_are_refused_with_the_fix(path: Path) -> None:
    save_tensors(path, {"a": torch.ones(100)}, {"step": 1})
    content = path.read_bytes()
    for damaged in (b"\xff" * 300, *(content[:size] for size in (0, 4, 8, 50, len(content) - 1))):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="state.safetensors is damaged .*delete the run.s folder and train again"):
            load_tensors(path)
    for metadata in (None, {"format": "pt"}, {"patchgen": "{torn"}):
        save_file({"a": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(ValueError, match="not a PatchGen checkpoint"):
            load_tensors(path)
    for missing in ("nothing.safetensors", "."):
        with pytest.raises(ValueError, match="there is no checkpoint"):
            load_tensors(path.parent / missing)


def test_a_checkpoint_without_a_checksum_is_read(path: Path) -> None:
    save_file({"a": torch.ones(2)}, path, metadata={"patchgen": json.dumps({"step": 1})})
    assert load_tensors(path)[1] == {"step": 1}


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("limit", ["rename", "size"])
def test_a_failed_checkpoint_keeps_the_old_one(limit: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(path, {"w": torch.ones(3)}, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a write beyond this fails as on a full disk
    else:
        monkeypatch.setattr(os, "replace", full_disk)
    try:
        with pytest.raises(OSError, match=r"No space left|state.safetensors cannot be written .*; free some space"):
            save_tensors(path, {"w": torch.zeros(10_000)}, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tensors, facts = load_tensors(path)
    assert torch.equal(tensors["w"], torch.ones(3)) and facts == {"step": 1}
    assert not list(path.parent.glob("*.tmp")) and not list(path.parent.glob(".*.tmp"))

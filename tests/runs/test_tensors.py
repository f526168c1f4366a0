"""Files of tensors: a flipped bit is noticed, and files of before the checksum are read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from patchgen.runs.tensors import load_tensors, save_tensors


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    tensors, facts = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, {"step": 3, "best": -1e999}
    save_tensors(path, tensors, facts)
    whole, refused = path.read_bytes(), 0
    for at in range(len(whole)):
        path.write_bytes(flipped(whole, at))
        try:
            found, about = load_tensors(path)
        except ValueError as error:
            assert "state.safetensors is damaged" in str(error)
            refused += 1
        else:
            assert {name: about.get(name) for name in facts} == facts
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert refused > 0.8 * len(whole)


def test_a_checkpoint_of_before_the_checksum_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"patchgen": json.dumps({"step": 1})})
    assert load_tensors(tmp_path / "x.safetensors")[1] == {"step": 1}

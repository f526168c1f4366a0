"""Defects that faults on purpose have found, each with the case that showed it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from patchgen import cli
from patchgen.config import Config, load_settings
from patchgen.data.stages import read_schedule
from patchgen.model.backbone import load_backbone
from patchgen.runs.find import describe
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors, save_tensors
from patchgen.train import fold as trainer_module
from patchgen.train.close import close_run
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = RunFolder.create(tmp_path, Config(data="photos", unseen="site_c"), "abc")
    for step in range(3):
        found.append({"kind": "evaluation", "step": step})
    return found


# Checkpoints: the format has no checksum, so a flipped bit of a weight went on as another number


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


def test_what_a_kill_left_beside_the_checkpoints_goes_with_the_next_start(run: RunFolder) -> None:
    stray = run.path / "checkpoints" / ".state.safetensors.0123456789ab.tmp"
    stray.write_bytes(b"half")
    run.checkpoint("selected").write_bytes(b"whole")
    with run.locked():
        assert not stray.exists() and run.checkpoint("selected").exists()


def test_a_state_that_a_kill_left_behind_done_goes_with_the_next_start(run: RunFolder) -> None:
    run.finish("")
    for name in ("state", "kept", "selected"):
        save_tensors(run.checkpoint(name), {"a": torch.ones(1)}, {})  # killed before two of them were removed
    RunFolder.create(run.path.parent, run.config, run.path.name)
    assert run.done and [path.stem for path in (run.path / "checkpoints").iterdir()] == ["selected"]


# Records: a damaged line was left out without a word


@pytest.mark.parametrize("line", [b"{half\n", b"\xff\xfe\n", b"3\n", b"[" * 100_000 + b"\n"])
def test_a_damaged_line_is_named_and_not_left_out(run: RunFolder, line: bytes) -> None:
    path = run.path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + lines[2])
    with pytest.raises(ValueError, match=r"records.jsonl, line 2, is damaged; restore the file"):
        run.records()
    assert describe(run).error is not None  # `patchgen runs` lists the others all the same


def test_a_finished_run_notices_that_a_number_has_changed(run: RunFolder) -> None:
    run.finish("")
    path = run.path / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 5'))
    with pytest.raises(ValueError, match="records.jsonl is damaged"):
        run.records()
    (run.path / "done").write_text("2026-01-01T00:00:00\n")  # as an older version wrote it
    assert [record["step"] for record in run.records()] == [0, 5, 2]


@pytest.mark.parametrize("change", [lambda content: content[:-20], lambda content: content.replace(b"1", b"7")])
def test_records_that_the_state_has_seen_must_be_there(run: RunFolder, change: Callable[[bytes], bytes]) -> None:
    mark = run.records_mark()
    path = run.path / "records.jsonl"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="not what the state has seen"):
        run.rewind_records(mark["records"], mark["records_crc32"])


# Settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unseen: null", "unseen must be text"),
        ("unseen: [a]", "unseen must be text"),
        ("backbone: {a: 1}", "backbone must be text"),
        ("hparams: 5", "hparams must be `name: value` lines"),
        ("hparams: {miro: x}", "hparams: each value must be a number under a name"),
        ("options: {1: a}", "options: each value must be text"),
        ("lr_backbone: 4.0e+290", r"lr_backbone must be at most 1e\+09"),
        ("hparams: {miro: 1.0e+290}", r"hparams: miro must be a number of at most 1e\+09"),
        ("image_size: 0", "image_size must be at least 1"),
        ("seed: 4294967296", "seed must be at most 4294967295"),
        ("threads: 100000", "threads must be at most 1024"),
        ("tau: 2024-13-45", "is not readable YAML: month must be in 1..12"),
        ("tau: " + "[" * 3000, "is not readable YAML"),
        ("tau: " + "9" * 5000, "is not readable YAML"),
    ],
)
def test_a_wrong_file_of_settings_is_one_line_with_its_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "\n".join(f"{k}: {v}" for k, v in {"data": "d", "unseen": "u"}.items() if k not in text) + f"\n{text}\n"
    )
    with pytest.raises(ValueError, match=message) as caught:
        load_settings(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["groups: 2024-13-45", "groups: " + "[" * 3000])
def test_a_wrong_schedule_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match="s.yaml is not readable YAML"):
        read_schedule(tmp_path / "s.yaml")


# Training


def test_nan_names_the_images_of_its_step_and_keeps_the_last_state(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = FoldTrainer._step, {}

    def step(self: FoldTrainer, number: int) -> None:
        seen[number] = {str(self.fold.table.file(row)) for row in self.batches.rows_at(number)[0]}
        if number == 3:
            next(self.model.head.parameters()).data.fill_(float("nan"))
        whole(self, number)

    monkeypatch.setattr(FoldTrainer, "_step", step)
    with pytest.raises(ValueError, match="diverged at step 3: .*lower --lr") as caught:
        train(Config(**tiny_settings), tmp_path, quiet=True)
    [run] = tmp_path.iterdir()
    found = json.loads((run / "diverged.json").read_text())
    assert found["step"] == 3 and set(found["images"]) == seen[3] and "main" in found["values"]
    assert any(name in str(caught.value) for name in seen[3])
    assert load_tensors(run / "checkpoints" / "state.safetensors")[1]["step"] == 2


def test_weights_alone_that_are_not_finite_name_the_last_step(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = FoldTrainer._step, {}

    def step(self: FoldTrainer, number: int) -> None:
        whole(self, number)
        seen[number] = {str(self.fold.table.file(row)) for row in self.batches.rows_at(number)[0]}
        if number == 2:  # evaluated right after it, and its losses were fine
            next(self.model.head.parameters()).data[0, 0] = float("inf")

    monkeypatch.setattr(FoldTrainer, "_step", step)
    with pytest.raises(ValueError, match="diverged at step 2: weights is not finite"):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    [file] = tmp_path.glob("*/diverged.json")
    found = json.loads(file.read_text())
    assert found["values"] == ["weights"] and set(found["images"]) == seen[2]
    monkeypatch.setattr(FoldTrainer, "_step", whole)
    assert train(Config(**tiny_settings), tmp_path, quiet=True).done and not file.exists()


def test_an_unfinished_run_gets_its_settings_back(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "close_run", lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    monkeypatch.setattr(trainer_module, "close_run", close_run)
    [file] = tmp_path.glob("*/config.yaml")
    good = file.read_bytes()
    file.write_bytes(good.replace(b"data: /", b"data: .", 1))  # one bit of the path
    assert file.read_bytes() != good
    assert train(Config(**tiny_settings), tmp_path, quiet=True).done
    assert file.read_bytes() == good


# The command line


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: ...")],
)
def test_a_lack_of_memory_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=fail))
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("patchgen train: there is not enough memory") and said.count("\n") == 1


# Backbones


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    load_backbone("tiny").model.save_pretrained(folder)
    return folder


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 400),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"model_type": "dinov2_with_registers", "hidden_size": "x"}'),
        ("config.json", b'{"model_type": "dinov2_with_registers", "num_attention_heads": 0}'),
        ("config.json", b'{"model_type": "dinov2_with_registers", "hidden_act": "nope"}'),
        ("preprocessor_config.json", b'{"image_mean": "x", "image_std": [1, 1, 1]}'),
        ("preprocessor_config.json", b'{"image_mean": [0, 0, 0], "image_std": [0, 0, 0]}'),
    ],
)
def test_a_damaged_backbone_folder_is_one_sentence(
    name: str, content: bytes, backbone_folder: Path, tmp_path: Path
) -> None:
    for file in backbone_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        load_backbone(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_weights_in_a_pickle_run_nothing(backbone_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((backbone_folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Touches(tmp_path / "touched")}))
    with pytest.raises(ValueError, match="cannot be read as"):
        load_backbone(str(tmp_path))
    assert not (tmp_path / "touched").exists()

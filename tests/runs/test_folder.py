"""The run folder under a kill, a full disk, damaged files and a second process."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.runs.find import describe
from patchgen.runs.folder import MODEL_FORMAT, RunFolder
from patchgen.runs.tensors import save_tensors
from patchgen.train.lifecycle import _first_process


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, Config(data="photos", unseen="site_c", seed=3), "abc")


def test_create_writes_the_settings_once(run: RunFolder, tmp_path: Path) -> None:
    again = RunFolder.create(tmp_path, Config(data="moved", unseen="site_c", seed=3), "abc")
    assert again.path == run.path == tmp_path / "abc"
    assert again.config == Config(data="photos", unseen="site_c", seed=3)
    assert not run.done and run.checkpoint("state") == run.path / "checkpoints" / "state.safetensors"
    assert RunFolder.open(run.path).config == run.config
    with pytest.raises(ValueError, match=r"made with other settings, seed 3 \(now 4\); train into another --out"):
        RunFolder.create(tmp_path, Config(data="photos", unseen="site_c", seed=4), "abc")


@pytest.mark.parametrize(
    ("kind", "message"),
    [(MODEL_FORMAT, "a model folder: use a run of its fit"), ("of another", "`patchgen train` prints one")],
)
def test_open_tells_a_model_folder(kind: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": kind}))
    with pytest.raises(ValueError, match=message):
        RunFolder.open(tmp_path)


# Records


def test_records_are_read_in_order_and_by_kind_without_a_truncated_line(run: RunFolder) -> None:
    written = [{"kind": "evaluation", "step": 0}, {"kind": "test", "class": "Öl"}, {"kind": "evaluation", "step": 2}]
    assert run.records() == []
    for record in written:
        run.append(record)
    for torn in ("", '{"ki', '{"kind": "evaluation", "step": 1'):
        with open(run.path / "records.jsonl", "a") as handle:
            handle.write(torn)
        assert run.records() == written
        assert run.records("evaluation") == [written[0], written[2]] and run.records("other") == []
        run.rewind_records(run.records_mark()["records"] - len(torn))


def test_rewind_drops_records_written_after_the_state(run: RunFolder) -> None:
    run.rewind_records(0)  # nothing is there yet
    run.append({"step": 0})
    size = run.records_mark()["records"]
    assert size == len('{"step": 0}\n')
    run.append({"step": 1})
    with open(run.path / "records.jsonl", "a") as handle:
        handle.write('{"st')
    run.rewind_records(size)
    run.append({"step": 2})
    assert (run.path / "records.jsonl").read_text() == '{"step": 0}\n{"step": 2}\n'
    with pytest.raises(ValueError, match="records.jsonl is damaged: it does not match the saved state"):
        run.rewind_records(10**6)
    assert run.records() == [{"step": 0}, {"step": 2}]


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_finish_is_atomic(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("state", "selected"):
        save_tensors(run.checkpoint(name), {"w": torch.ones(1)}, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="No space left"):
            run.finish("# summary\n")
    assert not run.done and run.checkpoint("state").exists()
    run.finish("# summary of Öl\n")
    assert run.done and (run.path / "summary.md").read_text(encoding="utf-8") == "# summary of Öl\n"
    assert not run.checkpoint("state").exists() and run.checkpoint("selected").exists()


# The lock

HOLD = """
import fcntl, sys
handle = open(sys.argv[1], "w")
fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_ended(run: RunFolder) -> None:
    command = [sys.executable, "-c", HOLD, str(run.path / ".lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="is being trained by another process"), run.locked():
            pass
    finally:
        other.kill()  # the lock goes with the process, however it ends
        other.wait()
        other.stdin.close()
        other.stdout.close()
    with run.locked():
        refused = subprocess.run(command, input="", capture_output=True, text=True)
        assert refused.returncode != 0 and "BlockingIOError" in refused.stderr
    with run.locked():
        pass


@pytest.mark.parametrize(
    ("name", "rank", "first"),
    [("RANK", "", True), ("RANK", "0", True), ("RANK", "1", False), ("SLURM_PROCID", "2", False)],
)
def test_only_the_first_process_of_a_distributed_job_locks(
    name: str, rank: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    if rank:
        monkeypatch.setenv(name, rank)
    assert _first_process() == first


# Damage


@pytest.fixture
def recorded(run: RunFolder) -> RunFolder:
    """A run with three records."""
    for step in range(3):
        run.append({"kind": "evaluation", "step": step})
    return run


def test_partial_checkpoints_of_a_killed_process_are_removed(recorded: RunFolder) -> None:
    stray = recorded.path / "checkpoints" / ".state.safetensors.0123456789ab.tmp"
    stray.write_bytes(b"half")
    recorded.checkpoint("selected").write_bytes(b"whole")
    with recorded.locked():
        assert not stray.exists() and recorded.checkpoint("selected").exists()


def test_a_leftover_state_of_a_finished_run_is_removed(recorded: RunFolder) -> None:
    recorded.finish("")
    for name in ("state", "kept", "selected"):
        save_tensors(recorded.checkpoint(name), {"a": torch.ones(1)}, {})  # killed before two of them were removed
    RunFolder.create(recorded.path.parent, recorded.config, recorded.path.name)
    assert recorded.done and [path.stem for path in (recorded.path / "checkpoints").iterdir()] == ["selected"]


@pytest.mark.parametrize("line", [b"{half\n", b"\xff\xfe\n", b"3\n", b"[" * 100_000 + b"\n"])
def test_a_damaged_line_is_an_error_with_its_number(recorded: RunFolder, line: bytes) -> None:
    path = recorded.path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + lines[2])
    with pytest.raises(ValueError, match=r"records.jsonl, line 2, is damaged; restore the file"):
        recorded.records()
    assert describe(recorded).error is not None  # `patchgen runs` lists the others all the same


def test_changed_records_of_a_finished_run_are_refused(recorded: RunFolder) -> None:
    recorded.finish("")
    path = recorded.path / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 5'))
    with pytest.raises(ValueError, match="records.jsonl is damaged"):
        recorded.records()
    (recorded.path / "done").write_text("2026-01-01T00:00:00\n")  # as an older version wrote it
    assert [record["step"] for record in recorded.records()] == [0, 5, 2]


@pytest.mark.parametrize("change", [lambda content: content[:-20], lambda content: content.replace(b"1", b"7")])
def test_records_must_match_the_saved_state(recorded: RunFolder, change: Callable[[bytes], bytes]) -> None:
    mark = recorded.records_mark()
    path = recorded.path / "records.jsonl"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="does not match the saved state"):
        recorded.rewind_records(mark["records"], mark["records_crc32"])

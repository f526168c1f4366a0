"""A local backbone is what is in its files: a copy is the same, other weights at the same name are others."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from patchgen.model.weights import content, local_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "vit"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "vit.safetensors"
    file.write_bytes(b"weights")
    assert content(str(file)) == "sha256:" + hashlib.sha256(b"weights").hexdigest()


def test_a_folder_is_what_is_read_of_it(folder: Path, tmp_path: Path) -> None:
    copy, before = Path(shutil.copytree(folder, tmp_path / "copy")), content(str(folder))
    (copy / "README.md").write_text("not read")
    assert content(str(copy)) == before is not None
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


@pytest.mark.parametrize("source", ["nowhere.safetensors", "/no/such/folder", "~nobody-at-all/x", "a\0b", "x" * 5000])
def test_what_is_not_there_has_no_content(source: str) -> None:
    assert local_path(source) is None and content(source) is None


def test_a_folder_without_a_model_has_no_content(tmp_path: Path) -> None:
    assert local_path(str(tmp_path)) == tmp_path and content(str(tmp_path)) is None

"""A table and a store that runs share: the same files give the same objects, changed files are seen."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.common.reading import process_cache
from patchgen.data.content import shared_store, shared_table
from patchgen.data.images import ImageStore
from patchgen.data.table import write_csv


@pytest.fixture
def folder(image_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(image_folder, tmp_path / "photos"))


def later(path: Path) -> None:
    """A time that no clock gives twice."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))


def test_a_folder_is_read_once_until_something_is_added(folder: Path) -> None:
    with process_cache():
        first = shared_table(str(folder), None, {})
        assert shared_table(str(folder), None, {}) is first
        shutil.copy(folder / "field" / "cross" / "00.png", folder / "field" / "cross" / "99.png")
        later(folder / "field" / "cross")
        second = shared_table(str(folder), None, {})
    assert len(second) == len(first) + 1
    assert shared_table(str(folder), None, {}) is not shared_table(str(folder), None, {})


def test_a_manifest_is_read_again_when_it_changes(folder: Path) -> None:
    lines = [
        (f"{domain}/{kind}/0{i}.png", domain, kind)
        for domain in ("field", "studio") for kind in ("cross", "circle") for i in range(3)
    ]  # fmt: skip
    manifest = folder / "some.csv"
    write_csv(manifest, ("path", "domain", "label"), lines)
    with process_cache():
        assert len(shared_table(str(manifest), None, {})) == 12
        write_csv(manifest, ("path", "domain", "label"), lines[:-1])
        later(manifest)
        assert len(shared_table(str(manifest), None, {})) == 11


def test_a_store_is_shared_until_a_file_changes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digest = ImageStore._digest
    monkeypatch.setattr(ImageStore, "_digest", lambda self, row: hashed.append(row) or digest(self, row))
    rows, cache = np.arange(4), tmp_path / "cache"
    with process_cache():
        table = shared_table(str(folder), None, {})
        store = shared_store(table, 28, cache, "bilinear")
        before = store.load(rows).numpy()
        hashed.clear()
        store.stain = lambda image: image
        assert shared_store(table, 28, cache, "bilinear") is store and store.stain is None
        store.load(rows)
        assert not hashed
        Image.new("RGB", (40, 40), "red").save(table.file(2))
        later(table.file(2))
        again = shared_store(table, 28, cache, "bilinear").load(rows).numpy()
        assert shared_store(table, 56, cache, "bilinear") is not store
    assert (again[2].reshape(3, -1).T == (255, 0, 0)).all() and (again[[0, 1, 3]] == before[[0, 1, 3]]).all()

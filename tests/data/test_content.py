"""Pixels that change under the same name and size: noticed, named, and cheap to look for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.common.reading import process_cache
from patchgen.data import content
from patchgen.data.content import digests, shared_store, shared_table
from patchgen.data.images import ImageStore
from patchgen.data.table import read_table

WORDS = "--unseen b --method lp --backbone tiny --image-size 28 --steps 2 --batch-per-domain 2 --val-images 2 --quiet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Uncompressed images: other pixels have the same size."""
    rng = np.random.default_rng(0)
    for domain in "abc":
        for kind in ("left", "right"):
            (tmp_path / "images" / domain / kind).mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / domain / kind / f"{i}.bmp")
    return tmp_path / "images"


def invert(file: Path) -> None:
    pixels, about = np.asarray(Image.open(file)), file.stat()
    Image.fromarray(255 - pixels).save(file)
    assert file.stat().st_size == about.st_size


def test_a_file_is_read_again_only_where_it_may_be_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, read = read_table(folder), []
    digest = content._digest
    monkeypatch.setattr(content, "_digest", lambda file: read.append(file) or digest(file))
    first = digests(table)
    assert np.array_equal(digests(table), first) and len(read) == len(table)
    invert(folder / "a" / "left" / "3.bmp")
    changed = digests(table)
    assert read[len(table) :] == [str(folder / "a" / "left" / "3.bmp")]
    assert [table.paths[i] for i in np.flatnonzero(changed != first)] == ["a/left/3.bmp"]


def test_a_damaged_store_is_made_again(folder: Path) -> None:
    table = read_table(folder)
    first = digests(table)
    for store in (content.cache_dir() / "content").glob("*.npy"):
        store.write_bytes(b"nothing")
    assert np.array_equal(digests(table), first)


def test_a_finished_run_of_other_pixels_is_not_taken_for_this_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(folder), *WORDS.split(), "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    os.utime(folder / "a" / "left" / "0.bmp")  # touched: the same pixels
    assert main(words) == 0
    for file in folder.rglob("*.bmp"):
        invert(file)
    assert main(words) == 2
    assert "30 of 30 images have changed since" in capsys.readouterr().err
    for file in folder.rglob("*.bmp"):
        invert(file)
    assert main(words) == 0


# A table and a store that runs share


@pytest.fixture
def photos(image_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(image_folder, tmp_path / "photos"))


def later(path: Path) -> None:
    """A time that no clock gives twice."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_a_table_is_read_once_until_it_changes(photos: Path, kind: str) -> None:
    manifest, cross = photos / "some.csv", photos / "field" / "cross"
    read_table(photos).to_csv(manifest)
    data = str(photos if kind == "folder" else manifest)
    with process_cache():
        first = shared_table(data, None, {})
        assert shared_table(data, None, {}) is first
        (cross / "00.png").rename(cross / "99.png")
        manifest.write_text(manifest.read_text().replace("field/cross/00.png", "field/cross/99.png"))
        later(cross if kind == "folder" else manifest)
        assert shared_table(data, None, {}).paths != first.paths
    assert shared_table(data, None, {}) is not shared_table(data, None, {})


def test_a_store_is_shared_until_a_file_changes(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digest = ImageStore._digest
    monkeypatch.setattr(ImageStore, "_digest", lambda self, row: hashed.append(row) or digest(self, row))
    rows, cache = np.arange(4), tmp_path / "cache"
    with process_cache():
        table = shared_table(str(photos), None, {})
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

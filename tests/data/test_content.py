"""Pixels that change under the same name and size: noticed, named, and cheap to look for."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.data import images
from patchgen.data.images import digests
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
    digest = images._digest
    monkeypatch.setattr(images, "_digest", lambda file, size: read.append(file) or digest(file, size))
    first = digests(table)
    assert np.array_equal(digests(table), first) and len(read) == len(table)
    invert(folder / "a" / "left" / "3.bmp")
    changed = digests(table)
    assert read[len(table) :] == [str(folder / "a" / "left" / "3.bmp")]
    assert [table.paths[i] for i in np.flatnonzero(changed != first)] == ["a/left/3.bmp"]


def test_a_damaged_store_is_made_again(folder: Path) -> None:
    table = read_table(folder)
    first = digests(table)
    for store in (images.cache_dir() / "content").glob("*.npy"):
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

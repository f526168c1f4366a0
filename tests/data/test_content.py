"""Pixels that change under the same name and size: noticed, named, and cheap to look for."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.data import content
from patchgen.data.content import digests
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


def test_a_digest_is_that_of_the_bytes(folder: Path) -> None:
    table = read_table(folder)
    wanted = [hashlib.blake2b(table.file(i).read_bytes(), digest_size=8).digest() for i in range(len(table))]
    assert [int(one).to_bytes(8, "little") for one in digests(table)] == wanted


def test_a_file_is_read_again_only_where_it_may_be_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, seen = read_table(folder), []
    whole = content._read
    monkeypatch.setattr(
        content, "_read", lambda files: seen.append(sorted(map(os.path.basename, files))) or whole(files)
    )
    first = digests(table)
    assert np.array_equal(digests(table), first) and len(seen) == 1 and len(seen[0]) == len(table)
    invert(folder / "a" / "left" / "3.bmp")
    changed = digests(table)
    assert seen[1:] == [["3.bmp"]]
    assert [table.paths[i] for i in np.flatnonzero(changed != first)] == ["a/left/3.bmp"]


def test_a_damaged_store_is_made_again(folder: Path) -> None:
    table = read_table(folder)
    first = digests(table)
    for store in (content.cache_dir() / "content").glob("*.npy"):
        store.write_bytes(b"nothing")
    assert np.array_equal(digests(table), first)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_finished_run_of_other_pixels_is_not_taken_for_this_one(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS.split(), "--out", str(tmp_path / "runs")]
    if command == "compare":
        words[2:4] = ["--methods", "lp"]
    assert main([command, str(folder), *words]) == 0
    os.utime(folder / "a" / "left" / "0.bmp")  # touched: the same pixels
    assert main([command, str(folder), *words]) == 0
    for file in folder.rglob("*.bmp"):
        invert(file)
    assert main([command, str(folder), *words]) == 2
    assert "30 of 30 images have changed since" in capsys.readouterr().err
    for file in folder.rglob("*.bmp"):
        invert(file)
    assert main([command, str(folder), *words]) == 0


def test_a_copy_is_the_same_data(folder: Path, tmp_path: Path) -> None:
    assert main(["train", str(folder), *WORDS.split(), "--out", str(tmp_path / "runs")]) == 0
    shutil.copytree(folder, tmp_path / "copy")
    assert main(["train", str(tmp_path / "copy"), *WORDS.split(), "--out", str(tmp_path / "runs")]) == 0
    assert len(list((tmp_path / "runs").glob("*/done"))) == 1


def test_a_folder_of_an_earlier_version_has_nothing_to_compare(folder: Path, tmp_path: Path) -> None:
    words = ["train", str(folder), *WORDS.split(), "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    [file] = (tmp_path / "runs").glob("*/content.npy")
    file.unlink()
    assert main(words) == 0 and not file.exists()


def test_a_plan_over_runs_that_are_there_reads_the_data_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are those of the table that named the run, whatever the options it was read with."""
    from patchgen.sweep import plan
    from patchgen.tasks import mdg

    words = ["compare", str(folder), *WORDS.split(), "--out", str(tmp_path / "runs")]
    words[4:6] = ["--methods", "lp"]
    assert main(words) == 0
    read, compared = [], []

    def reading(*given: object, **options: object) -> object:
        read.append(given)
        return read_table(*given, **options)  # type: ignore[arg-type]

    for module in (plan, mdg):
        monkeypatch.setattr(module, "read_table", reading)
    monkeypatch.setattr(plan, "digests", lambda table: compared.append(table) or digests(table))
    assert main([*words, "--table-only"]) == 0
    assert len(read) == len(compared) == 1

"""Links, pipes and bombs among images: nothing hangs, grows or counts twice."""

import os
import resource
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forged import png, progressive, tiff
from PIL import Image

from patchgen.cli import main
from patchgen.commands.options import find_images
from patchgen.common.child_process import child_environment, python
from patchgen.data.doctor import examine, inspect_files
from patchgen.data.image_files import list_images, open_image
from patchgen.data.images import ImageStore, UnreadableImage, decode, digests
from patchgen.data.table import read_table
from patchgen.draw.overlay import original


@pytest.fixture
def photos(image_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(image_folder, tmp_path / "photos")
    return tmp_path / "photos"


# Links and pipes


@pytest.mark.parametrize("target", [".", "..", "../..", "/"])
def test_loops_are_named(photos: Path, target: str) -> None:
    (photos / "clinic" / "circle" / "loop").symlink_to(target)
    for read in (read_table, lambda data: list_images(Path(data)), lambda data: find_images([str(data)])):
        with pytest.raises(ValueError, match="loop' links to .* a folder that contains it; remove the link"):
            read(photos)
    assert any(check.status == "fail" and "loop" in check.detail for check in examine(photos))


def test_a_file_is_listed_once(photos: Path) -> None:
    folder = photos / "clinic" / "circle"
    before = list_images(folder)
    (folder / "00-again.png").symlink_to("00.png")
    (folder / "more").mkdir()
    (folder / "more" / "linked").symlink_to(photos / "field" / "circle")
    (folder / "more" / "twice").symlink_to(photos / "field" / "circle")
    found = list_images(folder)
    assert found == [*before, *(f"more/linked/{i:02d}.png" for i in range(10))]
    assert len(find_images([str(photos / "clinic" / "**" / "*.png")])) == 30 + 10


def test_a_file_in_two_domains_is_refused(photos: Path) -> None:
    (photos / "clinic" / "circle" / "x.png").symlink_to("../../field/circle/00.png")
    with pytest.raises(ValueError, match="'clinic/circle/x.png' and 'field/circle/00.png' in .* are one file"):
        read_table(photos)


def test_pipes_are_no_images(photos: Path, tiny_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(read_table(photos))
    pipe = photos / "clinic" / "circle" / "zz.png"
    os.mkfifo(pipe)
    assert len(read_table(photos)) == before and len(find_images([str(photos)])) == before
    assert main(["predict", str(tiny_run("lp").path), str(pipe)]) == 1
    assert "pipe or device" in capsys.readouterr().err
    for read in (lambda file: decode(file, 8), lambda file: ImageStore([file], 8, None).load([0]), original):
        with pytest.raises(ValueError, match="pipe or device"):
            read(pipe)
    assert "zz" not in str(examine(photos))


# Bombs


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "scans.jpg": (lambda: progressive(2000, noise=255), "a JPEG of 20[01][0-9] scans, at most 100"),
    "large scans.jpg": (lambda: progressive(90, 6000, 2), "scans, at most 100, and fewer where it is large"),
    "scans.tif": (lambda: tiff(progressive(80, 8000), 8000, 7), "a JPEG of 8[0-9] scans, at most 100, and fewer where"),
    "tall scans.tif": (lambda: tiff(progressive(90, 8000), 16, 7), "a JPEG of 9[0-9] scans"),
    "hidden scans.tif": (lambda: tiff(progressive(80, 8000), 8000, 7, (259, 5)), "gives one of its tags twice"),
    "tile.tif": (lambda: tiff(zlib.compress(bytes(10**6)), 10, 8, (322, 29_984), (323, 29_984)), "have 899,040,256"),
    "strip.png": (lambda: png(1, 89_000_000, 2 * 89_000_000), "1 x 89000000 pixels, at most .* 65,535 on a side"),
    "program.png": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "cannot identify"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_at_once(bomb: str, tmp_path: Path) -> None:
    make, message = BOMBS[bomb]
    file = tmp_path / bomb
    file.write_bytes(make())
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (lambda: decode(file, 32), lambda: ImageStore([file], 32, None).load([0])):
        with pytest.raises(UnreadableImage, match=message):
            read()
    with pytest.raises(Exception, match=message):
        original(file)
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # kB


@pytest.mark.slow
def test_a_file_that_is_mostly_a_hole_is_refused_unread(tmp_path: Path, photos: Path) -> None:
    file = photos / "clinic" / "circle" / "00.png"
    for content in (progressive(0, 64, 255), progressive(0, 8)[:200], png(10, 1000, 11_000)):
        file.write_bytes(content)
        os.truncate(file, 1 << 36)
        with pytest.raises(UnreadableImage, match="a file of 68,719,476,736 bytes, at most 1,073,741,824"):
            decode(file, 8)
    facts = next(inspect_files([file], True, None))
    assert facts.error.startswith("a file of 68,719,476,736 bytes")
    with pytest.raises(ValueError, match="00.png: a file of 68,719,476,736 bytes"):
        digests(read_table(photos))


def test_usual_tiffs_are_read(tmp_path: Path) -> None:
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8))
    for name in ("jpeg", "tiff_lzw", "tiff_adobe_deflate", "raw"):
        pixels.save(tmp_path / "a.tif", compression=name)
        assert decode(tmp_path / "a.tif", 32).shape == (32, 32, 3)
    (tmp_path / "b.tif").write_bytes(tiff(progressive(5, 256), 256, 7, (322, 256), (323, 256)))
    assert (decode(tmp_path / "b.tif", 8) == 77).all()


def test_every_command_refuses_them(photos: Path, tiny_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = photos / "clinic" / "circle" / "00.png"
    bomb.write_bytes(progressive(2000))
    assert any("scans" in check.detail and check.status == "fail" for check in examine(photos))
    run = str(tiny_run("patchgen").path)
    assert main(["predict", run, str(bomb)]) == 1 and "scans" in capsys.readouterr().err
    out = str(photos.parent / "out")
    for words in (
        f"explain {run} {bomb} --out {out}",
        f"embed {run} {photos}/clinic --out {out}.npz",
        f"evaluate {run} {photos} --out {out} --resamples 0",
        f"discover {run} {photos}/clinic --out {out} --new-classes 1",
        f"train {photos} --unseen field --backbone tiny --image-size 28 --steps 1 --out {out}",
    ):
        main(words.split())
        assert "scans, at most 100" in capsys.readouterr().err, words


@pytest.mark.slow
def test_usual_progressive_photographs_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(progressive(0, 300, 255))
    thumbnail = b"\xff\xe1" + struct.pack(">H", 60_002) + b"\xff\xda" * 30_000  # looks like scans, but is none
    data = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "b.jpg").write_bytes(data[:2] + thumbnail + data[2:])
    assert np.array_equal(decode(tmp_path / "a.jpg", 32), decode(tmp_path / "b.jpg", 32))
    with open_image(tmp_path / "a.jpg") as image:
        assert image.size == (300, 300)


def test_no_program_is_started_for_an_image(tmp_path: Path) -> None:
    """Pillow reads EPS by starting Ghostscript."""
    mark = tmp_path / "mark"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    (tmp_path / "gs").chmod(0o755)
    (tmp_path / "a.png").write_bytes(BOMBS["program.png"][0]())
    code = f"from patchgen.data.images import decode\ndecode({str(tmp_path / 'a.png')!r}, 8)"
    environment = child_environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(python("-c", code), env=environment, capture_output=True, text=True, check=False)
    assert "UnreadableImage" in done.stderr and not mark.exists()

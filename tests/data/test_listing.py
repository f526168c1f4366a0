"""One rule for formats: what is listed can be read, and what is not is counted and named."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from patchgen.data import image_files
from patchgen.data.image_files import FORMATS, IMAGE_EXTENSIONS, list_files, readable_formats, skipped_line
from patchgen.data.images import UnreadableImage, decode

PICTURE = Image.fromarray(np.linspace(0, 255, 48 * 64 * 3).reshape(48, 64, 3).astype(np.uint8))
ENDINGS = [ending for name, endings in FORMATS.items() for ending in endings if name != "HEIF"]


def written(folder: Path, ending: str) -> Path:
    file = folder / f"picture{ending}"
    name = next(name for name, endings in FORMATS.items() if ending in endings)
    PICTURE.save(file, name)
    return file


def check_upload(file: Path) -> None:
    """As the viewer does; without its extra the rest of a test has passed."""
    pytest.importorskip("uvicorn")
    from patchgen.viewer import Limits
    from patchgen.viewer.uploads import check_image

    check_image(file.name, file.read_bytes(), Limits())


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_is_read_in_a_folder_by_name_and_in_the_viewer(ending: str, tmp_path: Path) -> None:
    if ending == ".avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    file = written(tmp_path, ending)
    assert list_files(tmp_path).images == [file.name]
    pixels = decode(file, 32).astype(int)
    expected = np.asarray(PICTURE.convert("L" if ending == ".pgm" else "RGB").convert("RGB").resize((32, 32)), int)
    assert abs(pixels - expected).mean() < 12  # GIF has 256 colours
    check_upload(file)


@pytest.mark.parametrize("ending", [".heic", ".heif"])
def test_heic_is_read_with_the_extra(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    assert "HEIF" in readable_formats()
    file = written(tmp_path, ending)
    assert list_files(tmp_path).images == [file.name]
    assert abs(decode(file, 32).astype(int) - np.asarray(PICTURE.resize((32, 32)), int)).mean() < 6
    check_upload(file)


@pytest.mark.parametrize(("brand", "needed"), [(b"heic", 'pip install "patchgen[heic]"'), (b"avif", "Pillow 11.3")])
def test_a_missing_decoder_is_named(brand: bytes, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "readable_formats", lambda: ("JPEG", "PNG"))
    file = tmp_path / "phone.heic"
    file.write_bytes(b"\0\0\0\x18ftyp" + brand + b"\0" * 100)
    with pytest.raises(UnreadableImage) as error:
        decode(file, 32)
    assert needed in str(error.value)
    with pytest.raises(UnreadableImage) as error:
        check_upload(file)
    assert needed in error.value.reason


def test_without_the_extra_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    found = readable_formats.__wrapped__()
    assert {"JPEG", "PNG", "GIF", "WEBP"} <= set(found) <= set(FORMATS)


def test_other_files_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.jpg", "b.HEIC", "deep/c.psd", "deep/d.psd", "notes.txt", "LICENSE", ".hidden"):
        (tmp_path / name).touch()
    files = list_files(tmp_path)
    assert files.images == ["a.jpg", "b.HEIC"] and len(files.skipped) == 4
    assert skipped_line(files.skipped) == (
        "4 files skipped, no image by the ending: 2 .psd, 1 .txt, 1 without an ending (such as LICENSE)"
    )
    assert len(set(IMAGE_EXTENSIONS)) == len(IMAGE_EXTENSIONS)

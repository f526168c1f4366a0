import errno
import hashlib
import os
import shutil
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchgen.cli import main
from patchgen.data import images
from patchgen.data.images import ImageStore, UnreadableImage, decode, digests
from patchgen.data.table import read_table

SIZE = 8
WORDS = "--unseen b --method lp --backbone tiny --image-size 28 --steps 2 --batch-per-domain 2 --val-images 2 --quiet"


def picture(seed: int, width: int = 20, height: int = 12) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    paths = [folder / f"{i}.png" for i in range(4)]
    for i, path in enumerate(paths):
        picture(i).save(path)
    return paths


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were decoded, in order."""
    calls: list[Path] = []

    def counting(path: Path, size: int, interpolation: str) -> np.ndarray:
        calls.append(Path(path))
        return decode(path, size, interpolation)

    monkeypatch.setattr(images, "decode", counting)
    return calls


def expected(files: list[Path], rows: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.stack([decode(files[row], SIZE) for row in rows]).transpose(0, 3, 1, 2).copy())


def cache_file(cache: Path, ending: str) -> Path:
    (path,) = (cache / "pixels").glob(f"*{ending}")
    return path


def save_and_decode(image: Image.Image, path: Path, size: int = 4, **options: Any) -> np.ndarray:
    image.save(path, **options)
    return decode(path, size)


def test_decode_is_pillows_antialiased_bilinear(tmp_path: Path) -> None:
    image = picture(1, 64, 40)
    found = save_and_decode(image, tmp_path / "a.png", 9)
    assert found.dtype == np.uint8 and found.shape == (9, 9, 3)
    assert np.array_equal(found, np.asarray(image.resize((9, 9), Image.Resampling.BILINEAR)))
    assert found.std() < np.asarray(image).std() / 2  # averaging, not picking


def test_a_large_jpeg_is_drafted_to_nearly_the_same_pixels(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 512, dtype=np.uint8)
    image = Image.fromarray(np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(90)), axis=-1))
    found = save_and_decode(image, tmp_path / "a.jpg", 16, quality=95)
    exact = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(found - exact).max() <= 4


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_fewer_bits_in_sixteen_are_not_dark(tmp_path: Path, name: str, bits: int) -> None:
    top = 2**bits - 1
    values = np.repeat(np.array([[0, top // 5, top // 2 + 1, top]], np.uint16), 4, axis=0)
    found = save_and_decode(Image.fromarray(values), tmp_path / name)[0, :, 0]
    assert found.tolist() == [round(255 * int(v) / top) for v in values[0]] and found[-1] == 255


def test_sixteen_bit_pgm_and_wide_values(tmp_path: Path) -> None:
    (tmp_path / "a.pgm").write_bytes(b"P5 2 2 65535\n" + np.full(4, 257 * 50, ">u2").tobytes())
    assert np.all(decode(tmp_path / "a.pgm", 2) == 50)
    Image.fromarray(np.full((2, 2), 70_000, np.int32)).save(tmp_path / "wide.tif")
    Image.fromarray(np.full((2, 2), 0.5, np.float32)).save(tmp_path / "float.tif")
    for name in ("wide.tif", "float.tif"):
        with pytest.raises(UnreadableImage, match="8 or 16 bits"):
            decode(tmp_path / name, 2)


@pytest.mark.parametrize(("image", "name", "options", "value"), [
    (Image.new("RGBA", (8, 8), (0, 0, 0, 51)), "a.png", {}, 204),  # on white: 255 (1 - 51/255)
    (Image.new("LA", (8, 8), (100, 0)), "a.png", {}, 255),
    (Image.new("RGB", (8, 8), "blue").quantize(1), "a.png", {}, (0, 0, 255)),
    (Image.new("RGB", (8, 8), "blue").quantize(1), "a.png", {"transparency": 0}, 255),
    (Image.new("1", (8, 8), 1), "a.png", {}, 255),
    (Image.new("L", (8, 8), 77), "a.png", {}, 77),
    (Image.fromarray(np.full((8, 8), 3, np.uint16)), "a.png", {}, 3),  # nearly black stays dark
    (Image.fromarray(np.zeros((8, 8), np.uint16)), "a.png", {}, 0),
    (Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "a.jpg", {"quality": 100}, (0, 255, 255)),
    (Image.new("RGB", (8, 8), "red"), "a.gif",  # the first frame
     {"save_all": True, "append_images": [Image.new("RGB", (8, 8), "blue")]}, (255, 0, 0)),
], ids=lambda value: getattr(value, "mode", ""))  # fmt: skip
def test_other_modes_become_rgb(
    image: Image.Image, name: str, options: dict[str, Any], value: int | tuple[int, ...], tmp_path: Path
) -> None:
    found = save_and_decode(image, tmp_path / name, **options).astype(int)
    assert np.abs(found - value).max() <= (3 if name.endswith("jpg") else 0)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2))
    image.paste((255, 255, 255), (0, 0, 2, 1))  # stored: white above
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter clockwise: white on the right
    found = save_and_decode(image, tmp_path / "a.png", 2, exif=exif)
    assert found[:, :, 0].tolist() == [[0, 255], [0, 255]]


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_truncated_file_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"cut.{kind}"
    picture(0, 200, 200).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UnreadableImage, match=f"cut.{kind}"):
        decode(path, SIZE)


@pytest.mark.parametrize(("limit", "size"), [(500, "30 x 20"), (200, "600")])  # beyond twice its limit Pillow refuses
@pytest.mark.parametrize("kind", ["png", "jpg", "tif", "bmp", "webp", "gif"])
def test_a_huge_image_is_refused_with_its_size_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, size: str, kind: str
) -> None:
    path = tmp_path / f"a.{kind}"
    picture(0, 30, 20).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings(), pytest.raises(UnreadableImage) as caught:
        warnings.simplefilter("ignore")
        decode(path, SIZE)
    text = f"cannot read image {path}: image too large ({size} pixels, at most {limit} in all, 65,535 on a side): cut"
    assert str(caught.value).startswith(text)


def test_load_equals_decode(files: list[Path], tmp_path: Path) -> None:
    for cache in (None, tmp_path / "cache"):
        store = ImageStore(files, SIZE, cache)
        for _ in range(2):
            found = store.load([2, 0, 2])
            assert found.shape == (3, 3, SIZE, SIZE) and found.dtype == torch.uint8
            assert torch.equal(found, expected(files, [2, 0, 2]))
        assert torch.equal(store.load(np.array([3])), expected(files, [3]))
    assert len(store) == 4 and store.load([]).shape == (0, 3, SIZE, SIZE)


def test_a_second_store_decodes_only_what_is_missing(files: list[Path], tmp_path: Path, decoded: list[Path]) -> None:
    ImageStore(files, SIZE, tmp_path).load([0, 1, 1])
    assert sorted(decoded) == files[:2]
    ImageStore(files, SIZE, tmp_path).load([1, 0, 3])
    assert decoded[2:] == [files[3]]
    ImageStore(files, SIZE + 1, tmp_path).load([0])  # another size or list has its own cache
    ImageStore(files[::-1], SIZE, tmp_path).load([0])
    assert len(list((tmp_path / "pixels").glob("*.slots"))) == 3


def test_changed_content_is_decoded_afresh(files: list[Path], tmp_path: Path, decoded: list[Path]) -> None:
    ImageStore(files, SIZE, tmp_path).load([0, 1])
    stamp = files[0].stat()
    picture(99).save(files[0])
    os.utime(files[0], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the content counts, not the date
    assert torch.equal(ImageStore(files, SIZE, tmp_path).load([0, 1]), expected(files, [0, 1]))
    assert decoded[2:] == [files[0]]


@pytest.mark.parametrize(("ending", "at", "content", "lost"), [
    (".pixels", 3 * SIZE * SIZE + 5, b"damage", [1]),
    (".pixels", 3 * SIZE * SIZE + 10, None, [1, 2]),  # truncated there
    (".slots", 24 + 7, None, [1, 2]),
    (".slots", 24 - 4, b"old!", [0]),  # the mark of a filled slot
])  # fmt: skip
def test_what_is_damaged_in_the_cache_is_decoded_again(
    files: list[Path], tmp_path: Path, decoded: list[Path], ending: str, at: int, content: bytes | None, lost: list[int]
) -> None:
    ImageStore(files, SIZE, tmp_path).load([0, 1, 2])  # the last slot is a hole
    with cache_file(tmp_path, ending).open("r+b") as file:
        file.seek(at)
        file.truncate() if content is None else file.write(content)
    for _ in range(2):  # the first reader repairs it
        assert torch.equal(ImageStore(files, SIZE, tmp_path).load([0, 1, 2]), expected(files, [0, 1, 2]))
    assert sorted(decoded[3:]) == [files[i] for i in lost]


def test_a_full_disk_warns_once_and_goes_on(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[Path]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    store = ImageStore(files, SIZE, tmp_path)
    with pytest.warns(UserWarning, match="No space left.*another cache folder") as caught:
        for row in (0, 1, 0):
            assert torch.equal(store.load([row]), expected(files, [row]))
    assert len(caught) == 1 and len(decoded) == 3


def test_a_read_only_cache_is_still_read(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[Path]
) -> None:
    ImageStore(files, SIZE, tmp_path).load([0])
    really_open = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.warns(UserWarning, match="Permission denied"):
        store = ImageStore(files, SIZE, tmp_path)
    assert torch.equal(store.load([0, 1]), expected(files, [0, 1]))
    assert decoded == [files[0], files[1]]  # the first by the writer, the second because it was not cached


def test_an_unreadable_image_names_its_path_and_reason(files: list[Path], tmp_path: Path) -> None:
    files[2].write_text("not an image")
    files[1].unlink()
    for row, reason in ((2, "UnidentifiedImageError.*remove the file"), (1, "FileNotFoundError")):
        for cache in (None, tmp_path):
            with pytest.raises(UnreadableImage, match=f"{files[row]}: {reason}"):
                ImageStore(files, SIZE, cache).load([0, row])


@pytest.fixture
def shapes(tmp_path: Path) -> list[Path]:
    """Wide, tall, square, and far too long."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    paths = [folder / f"{i}.png" for i in range(4)]
    for i, (width, height) in enumerate([(50, 30), (31, 47), (20, 20), (200, 10)]):
        picture(i, width, height).save(paths[i])
    return paths


def by_hand(path: Path, size: int) -> np.ndarray:
    """torchvision's `Resize(size, BICUBIC)`: the shorter side becomes `size`, the longer one is cut to whole pixels."""
    image = Image.open(path)
    if image.width == 200:  # longer than 4 : 1, of which the middle 40 of 200 columns are kept
        image = image.crop((80, 0, 120, 10))
    width, height = image.size
    longer = int(size * max(width, height) / min(width, height))
    shape = (longer, size) if width >= height else (size, longer)
    return np.asarray(image.resize(shape, Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def test_the_shorter_side_is_resized_bicubically_and_the_aspect_kept(shapes: list[Path], tmp_path: Path) -> None:
    truth = [by_hand(path, SIZE) for path in shapes]
    assert [image.shape[1:] for image in truth] == [(SIZE, int(SIZE * 50 / 30)), (int(SIZE * 47 / 31), SIZE),
                                                    (SIZE, SIZE), (SIZE, 4 * SIZE)]  # fmt: skip
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # decoded, decoded and written, read
        found = ImageStore(shapes, SIZE, cache, keep_aspect=True).images([3, 0, 1, 2, 0])
        assert all(np.array_equal(a, truth[i]) for a, i in zip(found, [3, 0, 1, 2, 0], strict=True))


def test_the_cache_of_square_images_is_the_one_of_earlier_versions(files: list[Path], tmp_path: Path) -> None:
    ImageStore(files, SIZE, tmp_path).load([1])
    text = "\n".join(["2", str(SIZE), *map(str, files)])
    assert cache_file(tmp_path, ".slots").stem == hashlib.blake2b(text.encode()).hexdigest()[:32]
    pixels = decode(files[1], SIZE).transpose(2, 0, 1).tobytes()
    source = hashlib.blake2b(files[1].read_bytes(), digest_size=16).digest()
    assert cache_file(tmp_path, ".pixels").read_bytes()[len(pixels) :] == pixels
    assert cache_file(tmp_path, ".slots").read_bytes()[24:] == struct.pack(
        "<16sII", source, zlib.crc32(pixels), 0x50474331
    )


def test_a_damaged_shape_is_decoded_again(shapes: list[Path], tmp_path: Path) -> None:
    ImageStore(shapes, SIZE, tmp_path / "cache", keep_aspect=True).images([0])
    with cache_file(tmp_path / "cache", ".slots").open("r+b") as file:
        file.seek(24)  # the height
        file.write(b"\xff\xff\xff\x0f")
    found = ImageStore(shapes, SIZE, tmp_path / "cache", keep_aspect=True).images([0])
    assert np.array_equal(found[0], by_hand(shapes[0], SIZE))


def test_a_large_cache_is_announced_or_refused(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(image_folder.rglob("*.png"))
    needed = 3 * 20 * 20 * len(files)
    monkeypatch.setattr(images, "LARGE_CACHE", needed)
    store = ImageStore(files, 20, tmp_path / "cache")
    assert f"the cache of {len(files)} decoded images needs" in capsys.readouterr().err
    store.load(range(len(files)))
    ImageStore(files, 20, tmp_path / "cache")  # it is there already
    assert capsys.readouterr().err == ""
    free = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    monkeypatch.setattr(images.shutil, "disk_usage", lambda place: free)
    with pytest.raises(ValueError, match="or add --no-cache"):
        ImageStore(files, 20, tmp_path / "other")
    ImageStore(files, 19, tmp_path / "other")  # not large


# Digests: pixels that change under the same name and size are noticed, and cheap to look for


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

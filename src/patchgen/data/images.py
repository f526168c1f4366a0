"""Decode images once: any file Pillow reads -> RGB uint8 of one size, in a cache shared between processes.

The cache is a pair of files per (list of files, size, interpolation, decode version): `<digest>.pixels`, slot i of
file i, and `<digest>.slots`, its record, written last. They are written with pwrite: a full disk is then a catchable
error (writing to an mmap would kill the process), and writers need no locks because they write the same bytes.
"""

import hashlib
import os
import shutil
import struct
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from patchgen.common.files import cache_dir, replacing
from patchgen.common.machine import available_cores
from patchgen.common.progress import logger
from patchgen.data.image_files import RefusedImage, check_file, open_image

if TYPE_CHECKING:
    import torch

    from patchgen.data.table import Table

DECODE_VERSION = 2  # increase it when `decode` changes its pixels: old caches are then ignored
RECORD = "<16sII"  # blake2b of the source file, crc32 of the pixels, FILLED; height and width where the aspect is kept
LONGEST = 4  # maximum aspect ratio of an image that keeps its aspect; longer ones are cropped to the middle
FILLED = 0x50474331
BILINEAR = "bilinear"
INTERPOLATIONS = ("nearest", "lanczos", BILINEAR, "bicubic", "box", "hamming")  # in the order of Pillow's numbers
CHECKED = 64  # images between two progress updates
READERS = 4  # files read in parallel for their digests
LARGE_CACHE = 2_000_000_000  # bytes from which the cache is announced, and refused where the disk is too small


class UnreadableImage(ValueError):
    """A file that cannot be decoded to an image, the `reason` and the fix."""

    def __init__(self, path: str | Path, reason: str, fix: str = "; repair, replace or remove the file") -> None:
        super().__init__(f"cannot read image {path}: {reason}{fix}")
        self.reason = reason


def decode(path: str | Path, size: int, interpolation: str = BILINEAR) -> np.ndarray:
    """Decode the first frame of `path`, upright, to RGB (size,size,3) uint8; the aspect is not kept.

    Transparency is blended with white, 16-bit grays are scaled to 8 by the bits they use, downscaling is antialiased.
    """
    with reporting(path), open_image(path) as image:
        image.draft(None, (2 * size, 2 * size))  # decodes a large JPEG at 1/2, 1/4 or 1/8, never below 2 x size
        return square(image, size, interpolation)


def decode_aspect(path: str | Path, size: int) -> np.ndarray:
    """Decode `path` to RGB (h,w,3) uint8 whose shorter side is `size`: bicubic, the longer side rounded down.

    An image more than `LONGEST` times as long as wide is cropped to its middle. JPEGs are decoded at full size.
    """
    with reporting(path), open_image(path) as image:
        rgb = _to_rgb(ImageOps.exif_transpose(image), image.format)
        shorter = min(rgb.size)
        width, height = (min(side, LONGEST * shorter) for side in rgb.size)
        left, top = (rgb.width - width) // 2, (rgb.height - height) // 2
        shape = (int(size * width / shorter), int(size * height / shorter))
        middle = rgb.crop((left, top, left + width, top + height))
        return np.array(middle.resize(shape, Image.Resampling.BICUBIC))


@contextmanager
def reporting(path: str | Path) -> Iterator[None]:
    """Whatever goes wrong inside is an `UnreadableImage` of this file."""
    try:
        yield
    except RefusedImage as error:
        raise UnreadableImage(path, str(error), fix="") from error
    except Exception as error:  # Pillow's plugins raise many types on bad bytes, and all of them mean this file
        raise UnreadableImage(path, f"{type(error).__name__}: {error}") from error


def square(image: Image.Image, size: int, interpolation: str = BILINEAR) -> np.ndarray:
    """(size,size,3) uint8 of an open image, by the rules of `decode`."""
    upright = ImageOps.exif_transpose(image)
    return np.array(_to_rgb(upright, image.format).resize((size, size), resampling(interpolation)))


def resampling(interpolation: str) -> Image.Resampling:
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, not {interpolation!r}")
    return Image.Resampling(INTERPOLATIONS.index(interpolation))


def gray_bits(values: np.ndarray, kind: str | None) -> int:
    """Bits that a 16-bit gray image of format `kind` uses, 8 to 16: scanners often use 12, without saying so."""
    # Pillow has already stretched the range of PGM
    return 16 if kind == "PPM" else max(8, int(values.max()).bit_length())


def _to_rgb(image: Image.Image, kind: str | None) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grays: I;16, I;16B, and I from PGM; convert() would clip them at 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise RefusedImage(f"values {values.min()}..{values.max()} do not fit 16 bits; save it with 8 or 16 bits")
        top = 2 ** gray_bits(values, kind) - 1
        return Image.fromarray(((2 * 255 * values + top) // (2 * top)).astype(np.uint8)).convert("RGB")  # rounded
    if image.mode == "F":
        raise RefusedImage("float pixels have no known range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _digest(file: str | Path, size: int) -> bytes:
    check_file(file)
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=size)).digest()


class ImageStore:
    """Decoded images of a list of files, by row; with `cache` each file is decoded once for all processes and runs.

    `size` is the side of the square images; with `keep_aspect` the shorter side, and resizing is always bicubic.
    """

    stain: Callable[[np.ndarray], np.ndarray] | None = None  # applied to images (H,W,3) as they are loaded, not cached

    def __init__(
        self, files: Sequence[Path], size: int, cache: Path | None, threads: int | None = None, *,
        keep_aspect: bool = False, interpolation: str = BILINEAR,
    ) -> None:  # fmt: skip
        resampling(interpolation)  # raises on an unknown name
        self.files, self.size, self.threads = [Path(file) for file in files], size, threads or available_cores()
        self.keep_aspect, self.interpolation = keep_aspect, interpolation
        self._record = struct.Struct(RECORD + "II" * keep_aspect)
        self._slot = 3 * size * size * (LONGEST if keep_aspect else 1)  # bytes
        self._verified: dict[int, tuple[int, int, int]] = {}  # crc, height, width of rows whose source was hashed here
        self._writable = cache is not None
        self._pixels = self._slots = -1  # file descriptors
        if cache is not None:
            self._open(Path(cache) / "pixels")

    def __len__(self) -> int:
        return len(self.files)

    def load(self, rows: Sequence[int] | np.ndarray) -> "torch.Tensor":
        """Images of `rows` as (B,3,size,size) uint8; missing ones are decoded in threads and added to the cache."""
        import torch  # here: a process that only decodes does not need it

        images = np.empty((len(rows), 3, self.size, self.size), np.uint8)
        return torch.from_numpy(np.stack(self.images(rows), out=images) if len(rows) else images)

    def images(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Images of `rows`, each (3,h,w) uint8 and read-only."""
        unique, inverse = np.unique(np.asarray(rows, dtype=np.int64), return_inverse=True)
        with ThreadPoolExecutor(self.threads) as pool:
            images = list(pool.map(self._image, unique.tolist()))
        return [images[i] for i in inverse]

    def unreadable(self, rows: np.ndarray, tick: Callable[[int], None]) -> list[tuple[int, UnreadableImage]]:
        """All rows that cannot be decoded, with the reason; the others are added to the cache."""

        def problem(row: int) -> UnreadableImage | None:
            try:
                self._image(row)
            except UnreadableImage as error:
                return error
            return None

        bad: list[tuple[int, UnreadableImage]] = []
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(rows), CHECKED):
                part = rows[start : start + CHECKED].tolist()
                bad += [(row, error) for row, error in zip(part, pool.map(problem, part), strict=True) if error]
                tick(len(part))
        return bad

    def _image(self, row: int) -> np.ndarray:
        """(3,h,w) uint8 from the cache, else from the file; with normalised stains if requested."""
        pixels = self._read(row)
        if pixels is None:
            # the digest is taken before the pixels: a file that changes in between is seen as changed, never as cached
            digest = self._digest(row) if self._writable else b""
            file, size = self.files[row], self.size
            decoded = decode_aspect(file, size) if self.keep_aspect else decode(file, size, self.interpolation)
            pixels = np.ascontiguousarray(decoded.transpose(2, 0, 1))
            if self._writable:
                self._write(row, digest, pixels)
        return pixels if self.stain is None else self.stain(pixels.transpose(1, 2, 0)).transpose(2, 0, 1)

    def _open(self, folder: Path) -> None:
        how = "bicubic, aspect kept" if self.keep_aspect else self.interpolation
        size = f"{self.size} {how}".removesuffix(f" {BILINEAR}")
        text = "\n".join([str(DECODE_VERSION), size, *map(str, self.files)])
        base = folder / hashlib.blake2b(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        pair = base.with_suffix(".pixels"), base.with_suffix(".slots")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._check_space(pair[0])
            self._open_pair(pair, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            self._stop_writing(error)
            if all(file.exists() for file in pair):  # a shared cache may be read-only
                self._open_pair(pair, os.O_RDONLY)

    def _check_space(self, file: Path) -> None:
        """Announce a large cache before it is written; ValueError for one that the disk cannot hold."""
        written = file.stat().st_blocks * 512 if file.exists() else 0  # the rest is a hole in the file
        needed = 3 * self.size**2 * len(self) - written
        if needed < LARGE_CACHE:
            return
        free = shutil.disk_usage(file.parent).free
        text = f"the cache of {len(self):,} decoded images needs {needed / 1e9:.1f} GB more in {file.parent}"
        if needed > free:
            fix = "free some space, set $PATCHGEN_CACHE to a folder on another disk, or add --no-cache"
            raise ValueError(f"{text}, and {free / 1e9:.1f} GB are free: {fix}")
        logger.warning(f"{text} ({free / 1e9:.1f} GB are free; --no-cache trains without it)")

    def _open_pair(self, pair: tuple[Path, Path], flags: int) -> None:
        self._pixels, self._slots = (os.open(file, flags, 0o666) for file in pair)
        for descriptor in (self._pixels, self._slots):
            weakref.finalize(self, os.close, descriptor)

    def _read(self, row: int) -> np.ndarray | None:
        """Pixels of a slot that matches the current content of this file, else None."""
        try:
            slot = self._verified.get(row) or (self._stored(row) if self._slots >= 0 else None)
            if slot is None:
                return None
            crc, height, width = slot
            pixels = os.pread(self._pixels, 3 * height * width, row * self._slot)
        except OSError as error:
            self._stop_writing(error)
            return None
        if len(pixels) != 3 * height * width or zlib.crc32(pixels) != crc:  # bit rot, or a writer killed in the middle
            return None
        self._verified[row] = slot
        return np.frombuffer(pixels, np.uint8).reshape(3, height, width)

    def _stored(self, row: int) -> tuple[int, int, int] | None:
        """(crc, height, width) of a slot that was filled from the current content of this file."""
        record = os.pread(self._slots, self._record.size, row * self._record.size)
        if len(record) != self._record.size:
            return None
        digest, crc, flag, *shape = self._record.unpack(record)
        height, width = shape or (self.size, self.size)
        filled = flag == FILLED and 0 < 3 * height * width <= self._slot
        return (crc, height, width) if filled and digest == self._digest(row) else None

    def _write(self, row: int, digest: bytes, pixels: np.ndarray) -> None:
        data, shape = pixels.tobytes(), pixels.shape[1:]
        crc = zlib.crc32(data)
        try:
            os.pwrite(self._pixels, data, row * self._slot)  # written in part, it has another crc32
            record = self._record.pack(digest, crc, FILLED, *(shape if self.keep_aspect else ()))
            os.pwrite(self._slots, record, row * self._record.size)
        except OSError as error:
            self._stop_writing(error)
        else:
            self._verified[row] = (crc, *shape)

    def _digest(self, row: int) -> bytes:
        with reporting(self.files[row]):
            return _digest(self.files[row], 16)

    def _stop_writing(self, error: OSError) -> None:
        if self._writable:
            self._writable = False
            rule = f"the image cache cannot be written ({error}), so images are decoded repeatedly"
            warnings.warn(f"{rule}: free some space, or choose another cache folder", stacklevel=2)


def digests(table: "Table") -> np.ndarray:
    """64 bits of BLAKE2 (N,) of each row's file, stored in the cache folder until its size, time or inode changes."""
    files = {_key(file): file for file in (os.path.join(table.root, path) for path in table.paths)}
    store = cache_dir() / "content" / f"{_hash(os.fsencode(os.path.abspath(table.root))):016x}.npy"
    try:
        keys, values = np.load(store, allow_pickle=False).astype(np.uint64, casting="no")
        known = dict(zip(keys.tolist(), values.tolist(), strict=True))
    except (OSError, ValueError, TypeError, EOFError):  # missing or damaged
        known = {}
    if new := {key: file for key, file in files.items() if key not in known}:
        with ThreadPoolExecutor(READERS) as pool:
            of_file = pool.map(lambda file: int.from_bytes(_digest(file, 8), "little"), new.values())
            known |= zip(new, of_file, strict=True)
        store.parent.mkdir(parents=True, exist_ok=True)
        with replacing(store) as temporary, open(temporary, "wb") as stream:
            np.save(stream, np.array([[*files], [known[key] for key in files]], dtype=np.uint64))
    return np.array([known[key] for key in files], dtype=np.uint64)


def _key(file: str) -> int:
    with reporting(file):
        about = check_file(file)
    return _hash(os.fsencode(f"{os.path.abspath(file)}\0{about.st_size}\0{about.st_mtime_ns}\0{about.st_ino}"))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

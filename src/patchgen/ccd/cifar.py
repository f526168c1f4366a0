"""CIFAR-100, official binary version: read once, and written as a folder of PNG files in the user's cache.

A record has 3,074 bytes: the coarse label, the fine label, and 3 x 32 x 32 pixels. The python version consists of
pickles, which can run any code, and is not read.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from patchgen.common.files import cache_dir, replacing_folder
from patchgen.data.table import Table

NAMES = "fine_label_names.txt"
OFFICIAL_IMAGES = {"train": 50_000, "test": 10_000}
RECORD = 2 + 3 * 32 * 32  # bytes
MOST_BYTES = 1 << 29  # of a file; the official `train.bin` has 154 MB


def is_cifar(folder: Path) -> bool:
    """Whether a folder looks like the official CIFAR-100, perhaps with a file missing; ValueError for its pickles."""
    if (folder / "meta").is_file() and any((folder / part).is_file() for part in OFFICIAL_IMAGES):
        raise ValueError(
            f"'{folder}' is the python version of CIFAR-100, whose pickles can run code and are not read: unpack the "
            "binary version, or convert this one with the ten lines in docs/study/ccd.md"
        )
    return (folder / NAMES).is_file() and any((folder / f"{part}.bin").is_file() for part in OFFICIAL_IMAGES)


def read_cifar(folder: Path) -> tuple[Table, np.ndarray, tuple[str, ...]]:
    """The images in the official order, as files in the user's cache; the rows of the test part; remarks."""
    files = [*(folder / f"{part}.bin" for part in OFFICIAL_IMAGES), folder / NAMES]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"'{folder}' lacks {', '.join(missing)}; unpack the binary version of CIFAR-100 again")
    classes = _class_names(folder / NAMES)
    parts = {file.stem: _records(file, len(classes)) for file in files[:2]}
    paths = tuple(f"{part}/{classes[record[1]]}/{i:05d}.png" for part, records in parts.items()
                  for i, record in enumerate(records))  # fmt: skip
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    home = Path(os.path.abspath(cache_dir() / "cifar-100" / digest.hexdigest()[:16]))
    if not all(os.path.isfile(os.path.join(home, path)) for path in paths):
        _write_images(home, paths, parts)
    label = np.concatenate([records[:, 1] for records in parts.values()]).astype(np.int64)
    counts = {part: len(records) for part, records in parts.items()}
    listed = " and ".join(f"{counts[part]:,} of {n:,} {part} images" for part, n in OFFICIAL_IMAGES.items())
    notes = () if counts == OFFICIAL_IMAGES else (f"CIFAR-100: a subset, {listed}",)
    table = Table(home, paths, ("cifar-100",), classes, np.zeros_like(label), label)
    return table, np.arange(counts["train"], len(paths)), notes


def _class_names(path: Path) -> tuple[str, ...]:
    """The fine classes; they become folder names, so names that would lead out of the cache are rejected."""
    with path.open("rb") as file:
        names = tuple(file.read(1 << 16).decode("utf-8", "replace").split("\n"))
    names = tuple(name.rstrip("\r") for name in names[: -1 if names[-1] == "" else None])
    bad = [name for name in names if not name or name.startswith(".") or set(name) & set("/\\:\0")]
    if len(names) < 2 or bad or len(set(names)) < len(names):
        raise ValueError(f"'{path}' must name two or more different classes, one a line, not {str(names):.200}")
    return names


def _records(path: Path, classes: int) -> np.ndarray:
    """The records of `train.bin` or `test.bin`, (N, 3074) uint8."""
    size = path.stat().st_size
    if not 0 < size <= MOST_BYTES or size % RECORD:
        raise ValueError(
            f"'{path}' has {size:,} bytes, which is not a whole number of records of {RECORD:,} bytes, at most "
            f"{MOST_BYTES:,}; unpack the binary version of CIFAR-100 again"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, RECORD)
    if (wrong := records[:, 1].max()) >= classes:
        raise ValueError(f"'{path}': fine labels go from 0 to {classes - 1} as in {NAMES}, but {wrong} occurs")
    return records


def _write_images(home: Path, paths: tuple[str, ...], parts: dict[str, np.ndarray]) -> None:
    from PIL import Image

    with replacing_folder(home, sync=False) as temporary:
        for place in {os.path.dirname(path) for path in paths}:
            (temporary / place).mkdir(parents=True)
        images = (record[2:].reshape(3, 32, 32) for records in parts.values() for record in records)
        for path, pixels in zip(paths, images, strict=True):
            Image.fromarray(pixels.transpose(1, 2, 0)).save(temporary / path, compress_level=1)

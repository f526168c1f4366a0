"""CIFAR-100, official binary version: read once, and written as a folder of PNG files in the user's cache.

A record has 3,074 bytes: the coarse label, the fine label, and 3 x 32 x 32 pixels. The python version consists of
pickles, which can run any code, and is not read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

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


def cifar_table(root: str | Path, part: Literal["train", "test"] = "train") -> Table:
    """The images of one part, in the official order, as files in the user's cache (written there the first time)."""
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    files = [folder / name for name in ("train.bin", "test.bin", NAMES)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"'{folder}' lacks {', '.join(missing)}; unpack the binary version of CIFAR-100 again")
    classes = _class_names(folder / NAMES)
    records = _records(folder / f"{part}.bin", len(classes))
    label = records[:, 1].astype(np.int64)
    paths = tuple(f"{part}/{classes[c]}/{i:05d}.png" for i, c in enumerate(label))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    home = cache_dir() / "cifar-100" / digest.hexdigest()[:16]
    if (home / part).is_dir():
        _check_complete(home, part, paths)
    else:
        with replacing_folder(home / part, sync=False) as temporary:
            _write_images(temporary, [path.removeprefix(f"{part}/") for path in paths], records[:, 2:])
    return Table(Path(os.path.abspath(home)), paths, ("cifar-100",), classes, np.zeros_like(label), label)


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


def _write_images(folder: Path, paths: Sequence[str], pixels: np.ndarray) -> None:
    """Write pixels (N, 3072), planes R, G, B."""
    from PIL import Image

    for place in {os.path.dirname(path) for path in paths}:
        (folder / place).mkdir(parents=True)
    for path, image in zip(paths, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), strict=True):
        Image.fromarray(np.ascontiguousarray(image)).save(folder / path, compress_level=1)


def _check_complete(home: Path, part: str, paths: Sequence[str]) -> None:
    """ValueError if images have been lost since they were written."""
    there = {f"{part}/{os.path.basename(place)}/{name}" for place, _, names in os.walk(home / part) for name in names}
    if lost := [path for path in paths if path not in there]:
        raise ValueError(
            f"'{home / part}' has lost {len(lost)} of {len(paths)} images, first '{lost[0]}'; remove that folder "
            "to have it written again"
        )

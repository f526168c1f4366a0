"""CIFAR-100 from its official pickles: read without executing them, and written once as a folder of PNG files.

    table = cifar_table("cifar-100-python", "train")      # 50,000 rows in the official order
    table.file(0)                                         # <cache>/cifar-100/<digest>/train/cattle/00000.png

A pickle can run any code. These are read by a separate parser (`patchgen.ccd.plain_pickle`), which runs none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from patchgen.ccd.plain_pickle import MOST_BYTES, RefusedPickle, read_plain
from patchgen.common.files import cache_dir, refuse_pipe, replacing_folder
from patchgen.data.table import Table

FILES = ("train", "test", "meta")
OFFICIAL_IMAGES = {"train": 50_000, "test": 10_000}
SIDE = 32
Progress = Callable[[int], object]


def is_cifar(folder: Path) -> bool:
    """Whether a folder looks like the official `cifar-100-python`, perhaps with a file missing."""
    return (folder / "meta").is_file() and any((folder / part).is_file() for part in ("train", "test"))


def cifar_table(root: str | Path, part: Literal["train", "test"] = "train", progress: Progress | None = None) -> Table:
    """The images of one part, in the official order, as files in the user's cache (written there the first time).

    Args:
        root: the folder with the official files `train`, `test` and `meta`.
        progress: called with 1 after each image that is written.
    """
    if part not in OFFICIAL_IMAGES:
        raise ValueError(f"CIFAR-100 has the parts {', '.join(OFFICIAL_IMAGES)}, not {part!r}")
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    if lost := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"'{folder}' lacks {', '.join(lost)} of the official files {', '.join(FILES)}; unpack the python version "
            "of CIFAR-100 again"
        )
    classes = _class_names(folder / "meta")
    pixels, label = _images(folder / part, len(classes))
    paths = tuple(f"{part}/{classes[c]}/{i:05d}.png" for i, c in enumerate(label))
    home = cache_dir() / "cifar-100" / _digest(folder)
    _write_once(home, part, paths, pixels, progress)
    domain = np.zeros(len(paths), dtype=np.int64)
    return Table(Path(os.path.abspath(home)), paths, ("cifar-100",), classes, domain, label)


def load_pickle(path: Path) -> dict[str, Any]:
    """The top-level dict of a pickle of plain values and arrays; anything else raises and is never called.

    Raises:
        RefusedPickle: it names a function or class that plain data does not need.
        ValueError: it is damaged, or contains something other than a dict.
    """
    refuse_pipe(path)
    try:
        with path.open("rb") as file:
            content = read_plain(file.read(MOST_BYTES + 1))
    except RefusedPickle as error:
        raise RefusedPickle(f"'{path}': {error}") from None
    except (EOFError, ValueError) as error:
        raise ValueError(
            f"'{path}' cannot be read ({type(error).__name__}: {error}); it is damaged or cut short: unpack it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' holds a {type(content).__name__}, not the dict of a CIFAR-100 file")
    return {_text(key): value for key, value in content.items()}


def _class_names(meta: Path) -> tuple[str, ...]:
    """The fine classes; they become folder names, so names that would lead out of the cache are rejected."""
    listed = _entry(load_pickle(meta), "fine_label_names", meta)
    names = tuple(map(_text, listed)) if isinstance(listed, (list, tuple)) else ()
    bad = [name for name in names if not name or name.startswith(".") or set(name) & set("/\\:\0")]
    if len(names) < 2 or bad or len(set(names)) < len(names):
        raise ValueError(f"'{meta}': fine_label_names must be two or more different plain names, got {listed!r:.200}")
    return names


def _images(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N,32,32,3) uint8 and fine labels (N,) int64 of `train` or `test`."""
    content = load_pickle(path)
    data, listed = _entry(content, "data", path), _entry(content, "fine_labels", path)
    width = 3 * SIDE * SIDE
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != width:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"'{path}': data must be bytes (uint8) of shape (images, {width}), got {found}")
    if not isinstance(listed, (list, tuple, np.ndarray)) or len(listed) != len(data) or not len(data):
        number = len(listed) if hasattr(listed, "__len__") else "no list of"
        raise ValueError(f"'{path}': each image needs one fine label; there are {len(data)} images, {number} labels")
    if wrong := [c for c in listed if not isinstance(c, (int, np.integer)) or not 0 <= c < classes]:
        raise ValueError(f"'{path}': fine labels are whole numbers from 0 to {classes - 1}, got {wrong[0]!r}")
    pixels = data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)  # planes R, G, B -> (N,32,32,3)
    return pixels, np.array(listed, dtype=np.int64)


def _entry(content: dict[str, Any], key: str, path: Path) -> Any:
    if key not in content:
        raise ValueError(
            f"'{path}' has no '{key}' (found: {', '.join(content) or 'nothing'}); it must be the CIFAR-100 file of the "
            "python version"
        )
    return content[key]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _digest(folder: Path) -> str:
    """Sixteen hex digits of the three files: different pickles get different folders."""
    digest = hashlib.sha256()
    for name in FILES:
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _write_once(
    home: Path, part: str, paths: Sequence[str], pixels: np.ndarray, progress: Progress | None = None
) -> None:
    """Write `home/part` unless it exists, atomically."""
    if _is_complete(home, part, paths):
        return
    with replacing_folder(home / part, sync=False) as temporary:  # a race writes the same images twice
        _write_images(temporary, [path.removeprefix(f"{part}/") for path in paths], pixels, progress)


def _write_images(folder: Path, paths: Sequence[str], pixels: np.ndarray, progress: Progress | None) -> None:
    from PIL import Image

    for place in {os.path.dirname(path) for path in paths}:
        (folder / place).mkdir(parents=True)
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(np.ascontiguousarray(image)).save(folder / path, compress_level=1)
        if progress:
            progress(1)


def _is_complete(home: Path, part: str, paths: Sequence[str]) -> bool:
    """Whether all images exist; ValueError if some have been lost since they were written."""
    if not (home / part).is_dir():
        return False
    there = {f"{part}/{os.path.basename(place)}/{name}" for place, _, names in os.walk(home / part) for name in names}
    if lost := [path for path in paths if path not in there]:
        raise ValueError(
            f"'{home / part}' has lost {len(lost)} of {len(paths)} images, first '{lost[0]}'; remove that folder "
            "to have it written again"
        )
    return True

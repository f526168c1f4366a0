"""User input -> data for `read_table`: a folder or manifest unchanged, arrays as a manifest.

    data = as_data(X, y, domains, groups, "runs")       # X: (N, H, W, 3) uint8, or a list of paths or PIL images

Arrays and open images are written as lossless PNG files into a folder named by their content, so that they are reused
when a fit is repeated or resumed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.csv_files import write_csv
from patchgen.common.files import replacing_folder
from patchgen.data.images import UnreadableImage
from patchgen.data.inputs import check_images, opened

COLUMNS = ("path", "domain", "label", "group")


def as_data(data: Any, y: Any, domains: Any, groups: Any, home: str | Path) -> str:
    """A path for `Config.data`; images in memory are written to a folder below `home`."""
    if isinstance(data, (str, os.PathLike)):
        if y is not None or domains is not None or groups is not None:
            raise ValueError("a folder or manifest names its classes, domains and groups itself: leave y, domains and "
                             "groups out, or give a list of image paths")  # fmt: skip
        return os.fspath(data)
    if y is None or domains is None:
        raise ValueError("arrays and lists need y= (the class) and domains= (the site) of each image: "
                         "without sites nothing can be said of a new one")  # fmt: skip
    images = check_images(data)
    given = {"domains": domains, "y": y, "groups": groups}
    columns = {name: _names(values, name, len(images)) for name, values in given.items() if values is not None}
    return str(_write(images, columns, Path(home)))


def _names(values: Any, name: str, count: int) -> list[str]:
    """Names of one column; whole numbers become text."""
    found = [str(value).strip() for value in np.asarray(values).tolist()]
    if np.asarray(values).ndim != 1 or len(found) != count:
        raise ValueError(f"{name} must have one value for each of the {count} images, got {np.shape(values)}")
    kinds = {type(value) for value in np.asarray(values).tolist()} - {str, int}
    if kinds or "" in found:
        raise ValueError(f"{name} must be names or whole numbers, and none empty")
    return found


def _write(images: Sequence[Any], columns: dict[str, list[str]], home: Path) -> Path:
    """Write the manifest with its images, atomically."""
    folder = home / f"images-{_digest(images, columns)}"
    manifest = folder / "manifest.csv"
    if manifest.is_file():
        return manifest
    with replacing_folder(folder) as temporary:
        digits = max(6, len(str(len(images))))
        paths = [_place(image, temporary, f"{i:0{digits}}.png") for i, image in enumerate(images)]
        cells = [columns[name] for name in ("domains", "y", "groups") if name in columns]
        write_csv(temporary / "manifest.csv", COLUMNS[: 1 + len(cells)], zip(paths, *cells, strict=True))
    return manifest


def _place(image: Any, folder: Path, name: str) -> str:
    """The path of an image: its own file, or a PNG written here."""
    if isinstance(image, (str, os.PathLike)):
        return Path(os.path.abspath(image)).as_posix()
    try:
        opened(image).save(folder / name)
    except OSError as error:  # a mode that PNG lacks
        raise UnreadableImage(name, str(error), "; convert it to RGB") from error
    return name


def _digest(images: Sequence[Any], columns: dict[str, list[str]]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for image in images:
        if isinstance(image, (str, os.PathLike)):
            digest.update(os.path.abspath(image).encode("utf-8", "surrogateescape") + b"\0")
        else:
            pixels = opened(image)
            digest.update(f"{pixels.mode}{pixels.size}".encode() + pixels.tobytes())
    for name, values in columns.items():
        digest.update("\0".join([name, *values]).encode() + b"\0\0")
    return digest.hexdigest()

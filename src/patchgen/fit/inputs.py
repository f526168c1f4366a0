"""User input -> data for `read_table`: a folder or manifest unchanged, anything else as a manifest.

Images in memory become PNG files in a folder named by their content, which a repeated or resumed fit uses again.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import replacing_folder, write_csv
from patchgen.data.images import UnreadableImage
from patchgen.data.inputs import as_images, is_dataset, opened
from patchgen.data.table import is_weight

COLUMNS = {"domains": "domain", "y": "label", "groups": "group", "sample_weight": "sample_weight"}


def as_data(
    data: Any, y: Any, domains: Any, groups: Any, home: str | Path, sample_weight: Any = None
) -> tuple[str, str | None]:
    """A path, below `home` or as given, and the kind of the classes that predictions then have: int, bool or None."""
    columns = {"domains": domains, "y": y, "groups": groups, "sample_weight": sample_weight}
    if isinstance(data, (str, os.PathLike)):
        if any(values is not None for values in columns.values()):
            raise ValueError("a folder or manifest names these itself: leave y, domains, groups and sample_weight out, "
                             "or give a list of image paths")  # fmt: skip
        return os.fspath(data), None
    if hasattr(data, "columns"):
        data, columns = _from_frame(data, columns)
    images = as_images(data)
    if columns["y"] is None:
        if not is_dataset(data):
            raise ValueError("images need y=, the class of each one; domains=, their sites; and, if known, groups=")
        columns["y"] = [_label(data[i], i) for i in range(len(data))]
    if columns["domains"] is None:
        columns["domains"] = ["images"] * len(images)
    texts = {
        name: (_weights if name == "sample_weight" else _names)(values, name, len(images))
        for name, values in columns.items()
        if values is not None
    }
    if len(set(texts["y"])) == 1:
        raise ValueError(f"at least two classes are needed, and every label is {texts['y'][0]!r}")
    kind = {"i": "int", "u": "int", "b": "bool"}.get(np.asarray(columns["y"]).dtype.kind)
    return str(_write(images, texts, Path(home))), kind


def _from_frame(frame: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The paths of a DataFrame, and its columns label, site (or domain), group and sample_weight."""
    if any(given[name] is not None for name in ("y", "domains", "groups")):
        raise ValueError("a DataFrame has its columns path, label, site and group: leave y, domains and groups out")
    paths = paths_of(frame, "label")
    own = COLUMNS | ({"domains": "site"} if "site" in frame.columns else {})
    columns = {name: frame[column].tolist() for name, column in own.items() if column in frame.columns}
    return paths, given | columns | {name: values for name, values in given.items() if values is not None}


def paths_of(frame: Any, *more: str) -> list[Any]:
    """The column `path` of a DataFrame; ValueError if it, or one `more`, is missing."""
    if missing := [name for name in ("path", *more) if name not in frame.columns]:
        raise ValueError(f"a DataFrame has no {missing[0]} (it has {', '.join(map(str, frame.columns))})")
    return list(frame["path"])


def _label(item: Any, i: int) -> Any:
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise ValueError(f"items of a Dataset must be (image, label), or give y=; item {i} is {type(item).__name__}")
    return item[1].item() if hasattr(item[1], "item") else item[1]


def _names(values: Any, name: str, count: int) -> list[str]:
    """Names of one column; whole numbers, true and false become text."""
    array = np.asarray(values)
    names = [str(value).strip() for value in array.tolist()] if array.ndim == 1 else []
    if len(names) != count:
        raise ValueError(f"{name} must have one value for each of the {count} images, got {array.shape}")
    kinds = {type(value) for value in array.tolist()} - {str, int, bool}
    if kinds or "" in names:
        raise ValueError(f"{name} must be names, whole numbers, or true and false, and none empty")
    return names


def _weights(values: Any, name: str, count: int) -> list[str]:
    array = np.asarray(values)
    if array.shape != (count,) or not all(map(is_weight, array.tolist())):
        raise ValueError(f"{name} must have one number of at least 0 for each of the {count} images")
    return [repr(float(value)) for value in array.tolist()]


def _write(images: Sequence[Any], columns: dict[str, list[str]], home: Path) -> Path:
    """Write the manifest with its images, atomically."""
    folder = home / f"images-{_digest(images, columns)}"
    manifest = folder / "manifest.csv"
    if manifest.is_file():
        return manifest
    with replacing_folder(folder) as temporary:
        digits = max(6, len(str(len(images))))
        paths = [_place(image, temporary, f"{i:0{digits}}.png") for i, image in enumerate(images)]
        header = ["path", *(COLUMNS[name] for name in columns)]
        write_csv(temporary / "manifest.csv", header, zip(paths, *columns.values(), strict=True))
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

"""CUB-200-2011 as published: four lists joined on the image id.

    cub = read_cub("CUB_200_2011")
    cub.table                                  # all rows, in the order of img_id; class id 1 is label 0
    cub.train, cub.test                        # rows of the official parts: 5,994 and 5,794

Copies with fewer images are common; they are accepted, and the notes say what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patchgen.data.table import Table

FILES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
OFFICIAL_IMAGES = {"train": 5_994, "test": 5_794}


@dataclass(frozen=True, eq=False)
class Cub:
    """The images that exist, and the rows of the official parts."""

    table: Table
    train: np.ndarray  # rows, ascending
    test: np.ndarray
    notes: tuple[str, ...]  # missing parts of the official data


def is_cub(folder: Path) -> bool:
    """Whether a folder looks like the official `CUB_200_2011`, perhaps with a list missing."""
    return (folder / "images.txt").is_file() and any((folder / name).is_file() for name in FILES[1:])


def read_cub(root: str | Path) -> Cub:
    """Join the official lists; a subset of the images is accepted with a note, a broken list raises ValueError."""
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    if lost := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"'{folder}' lacks {len(lost)} of the {len(FILES)} official lists: {', '.join(lost)}; unpack "
            "CUB_200_2011 again"
        )
    paths, classes = _read_list(folder / "images.txt"), _read_list(folder / "classes.txt")
    class_of, is_train = _read_list(folder / "image_class_labels.txt"), _read_list(folder / "train_test_split.txt")
    _check_join(folder, paths, class_of, is_train, classes)
    ids = [i for i in sorted(paths) if (folder / "images" / paths[i]).is_file()]
    if not ids:
        raise ValueError(f"none of the {len(paths):,} listed images is in '{folder / 'images'}'; unpack them there")
    order = {class_id: c for c, class_id in enumerate(sorted(classes))}
    label = np.array([order[int(class_of[i])] for i in ids], dtype=np.int64)
    names = tuple(classes[class_id] for class_id in order)
    files = tuple(f"images/{paths[i]}" for i in ids)
    table = Table(folder, files, ("CUB-200-2011",), names, np.zeros(len(ids), dtype=np.int64), label)
    train = np.array([is_train[i] == "1" for i in ids], dtype=bool)
    notes = _notes(paths, is_train, ids, train)
    return Cub(table, np.flatnonzero(train), np.flatnonzero(~train), notes)


def _read_list(path: Path) -> dict[int, str]:
    """The lines `id value` of a list, each id once."""
    values: dict[int, str] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is no text file ({error}); unpack it again") from error
    for number, line in enumerate(lines, 1):
        key, _, value = line.strip().partition(" ")
        if not key:
            continue
        if not (key.isascii() and key.isdecimal() and value.strip()):
            raise ValueError(f"'{path}', line {number}: expected a number, a space and a value, got {line!r:.80}")
        if int(key) in values:
            raise ValueError(f"'{path}', line {number}: the id {key} appears twice; keep one")
        values[int(key)] = value.strip()
    if not values:
        raise ValueError(f"'{path}' is empty; unpack it again")
    return values


def _check_join(
    folder: Path,
    paths: Mapping[int, str],
    class_of: Mapping[int, str],
    is_train: Mapping[int, str],
    classes: Mapping[int, str],
) -> None:
    """Every image needs a class that exists and a part; every class its own name."""
    for path in paths.values():
        if os.path.isabs(path) or ".." in path.split("/"):
            raise ValueError(f"'{folder / FILES[0]}': {path!r} leads out of the folder; get CUB from its source")
    ids = set(map(str, classes))
    for name, column, known, rule in (
        (FILES[1], class_of, ids, f"a class id of classes.txt ({len(ids)} classes)"),
        (FILES[2], is_train, {"0", "1"}, "1 (train) or 0 (test)"),
    ):
        if lost := [i for i in paths if i not in column]:
            raise ValueError(
                f"'{folder / name}' says nothing of {len(lost):,} of the {len(paths):,} images in images.txt, first id "
                f"{lost[0]}; both must come from the same copy of CUB"
            )
        if wrong := [i for i in paths if column[i] not in known]:
            what = f"image {wrong[0]} has {column[wrong[0]]!r}, not {rule}"
            raise ValueError(f"'{folder / name}': {what}; {len(wrong):,} such")
    if len(set(classes.values())) < len(classes):
        raise ValueError(f"'{folder / 'classes.txt'}' gives two classes the same name; unpack it again")


def _notes(paths: Mapping[int, str], is_train: Mapping[int, str], ids: list[int], train: np.ndarray) -> tuple[str, ...]:
    """Listed images that are missing, and the difference from the official size."""
    notes = []
    if gone := sorted(set(paths) - set(ids)):
        notes.append(f"CUB: {len(gone):,} of {len(paths):,} listed images are not there, first '{paths[gone[0]]}'")
    if unnamed := len(set(is_train) - set(paths)):
        notes.append(f"CUB: train_test_split.txt names {unnamed:,} images that images.txt does not have")
    here = {"train": int(train.sum()), "test": int((~train).sum())}
    if here != OFFICIAL_IMAGES:
        parts = " and ".join(f"{here[part]:,} of {n:,} {part} images" for part, n in OFFICIAL_IMAGES.items())
        notes.append(f"CUB: a subset, {parts}")
    return tuple(notes)

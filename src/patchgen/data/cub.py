"""CUB-200-2011 as published: four lists joined on the image id. Copies with fewer images are common, and accepted."""

import os
from pathlib import Path

import numpy as np

from patchgen.common.untrusted import shortly
from patchgen.data.table import Table

FILES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
OFFICIAL_IMAGES = {"train": 5_994, "test": 5_794}


def is_cub(folder: Path) -> bool:
    """Whether a folder looks like the official `CUB_200_2011`, perhaps with a list missing."""
    return (folder / "images.txt").is_file() and any((folder / name).is_file() for name in FILES[1:])


def read_cub(root: str | Path) -> tuple[Table, np.ndarray, tuple[str, ...]]:
    """The images that exist, in the order of their ids, the rows of the official test part, and what is missing."""
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    if lost := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(f"'{folder}' lacks {len(lost)} of the official lists: {', '.join(lost)}; unpack it again")
    paths, class_of, is_train, classes = (_read_list(folder / name) for name in FILES)
    if outside := [path for path in paths.values() if os.path.isabs(path) or ".." in path.split("/")]:
        raise ValueError(f"'{folder / FILES[0]}': {outside[0]!r} leads out of the folder; get CUB from its source")
    order = {str(class_id): c for c, class_id in enumerate(sorted(classes))}
    for file, column, allowed in ((FILES[1], class_of, [*order]), (FILES[2], is_train, ["0", "1"])):
        if wrong := [i for i in paths if column.get(i) not in allowed]:
            raise ValueError(
                f"'{folder / file}' gives {len(wrong):,} of the {len(paths):,} images of {FILES[0]} no value of "
                f"{shortly(allowed)}, first image {wrong[0]} ({column.get(wrong[0])!r}); take all lists from one copy"
            )
    ids = [i for i in sorted(paths) if (folder / "images" / paths[i]).is_file()]
    if not ids:
        raise ValueError(f"none of the {len(paths):,} listed images is in '{folder / 'images'}'; unpack them there")
    label = np.array([order[class_of[i]] for i in ids], dtype=np.int64)
    names, files = tuple(classes[i] for i in sorted(classes)), tuple(f"images/{paths[i]}" for i in ids)
    table = Table(folder, files, ("CUB-200-2011",), names, np.zeros(len(ids), dtype=np.int64), label)
    train = np.array([is_train[i] == "1" for i in ids], dtype=bool)
    notes = []
    if gone := sorted(set(paths) - set(ids)):
        notes.append(f"CUB: {len(gone):,} of {len(paths):,} listed images are not there, first '{paths[gone[0]]}'")
    counts = {"train": int(train.sum()), "test": int((~train).sum())}
    if counts != OFFICIAL_IMAGES:
        parts = " and ".join(f"{counts[part]:,} of {n:,} {part} images" for part, n in OFFICIAL_IMAGES.items())
        notes.append(f"CUB: a subset, {parts}")
    return table, np.flatnonzero(~train), tuple(notes)


def _read_list(path: Path) -> dict[int, str]:
    values: dict[int, str] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is no text file ({error}); unpack it again") from error
    for number, line in ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()):
        key, _, value = line.partition(" ")
        if not (key.isascii() and key.isdecimal() and value) or int(key) in values:
            raise ValueError(f"'{path}', line {number}: expected a new number, a space and a value, got {line!r:.80}")
        values[int(key)] = value.strip()
    return values

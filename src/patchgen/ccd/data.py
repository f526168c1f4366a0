"""The data of continual category discovery: one labelled stage, then unlabelled stages with more and more classes.

Supported are the official CIFAR-100 and CUB-200-2011, whose test parts are held out; `<class>/*.jpg`;
`<domain>/<class>/*.jpg` and manifests, whose domains are ignored, unless they are `train` with `test` or `val`.

CIFAR-100 is read in its binary version, once, and written as PNG files in the user's cache. A record has 3,074 bytes:
the coarse label, the fine label, and 3 x 32 x 32 pixels. The python version's pickles, which can run code, are refused.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchgen.ccd.settings import StreamConfig
from patchgen.ccd.stages import Schedule, Stages, get_schedule, make_stages, shuffled, some_of
from patchgen.common.files import cache_dir, replacing_folder, write_csv
from patchgen.data.cub import is_cub, read_cub
from patchgen.data.image_files import visible_folders
from patchgen.data.table import Table, fingerprint, read_table

CIFAR_NAMES = "fine_label_names.txt"
OFFICIAL_IMAGES = {"train": 50_000, "test": 10_000}
CIFAR_RECORD = 2 + 3 * 32 * 32  # bytes
MOST_BYTES = 1 << 29  # of a file; the official `train.bin` has 154 MB
HELD_OUT_DRAW = 1  # a separate random stream: held-out images are independent of the stages
HELD_OUT_NAMES = {"test", "val", "valid", "validation"}


@dataclass(frozen=True, eq=False)
class Stream:
    """The rows of a table in stages; a row is in one stage, held out, or not used."""

    table: Table
    schedule: Schedule
    stages: Stages
    held_out: np.ndarray  # rows never trained on: the official test part, or a drawn share of every class
    notes: tuple[str, ...]  # remarks on the data for the user

    def fingerprint(self) -> str:
        digest = hashlib.sha256(fingerprint(self.table).encode())
        for rows in (self.stages.stage, self.held_out):
            digest.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]

    def write_rows(self, folder: Path) -> None:
        """The path, the class and the stage of every image (-1: in none)."""
        rows = ((self.table.paths[i], self.table.label_name(i), str(s)) for i, s in enumerate(self.stages.stage))
        write_csv(folder / "stages.csv", ("path", "label", "stage"), rows)

    @property
    def label(self) -> np.ndarray:
        """True class ids, (N,); beyond stage 0 they are for the scorer alone."""
        return self.table.label

    @property
    def known(self) -> np.ndarray:
        """Ids of the labelled classes, those of stage 0: "K" of every later score."""
        return np.flatnonzero(self.stages.entry == 0)

    @property
    def train(self) -> tuple[np.ndarray, ...]:
        """Training rows of each stage, ascending."""
        return tuple(self.stages.rows(stage) for stage in range(len(self.stages)))

    def entered(self, rows: np.ndarray, stage: int) -> np.ndarray:
        """The rows whose class has appeared up to a stage."""
        return rows[np.isin(self.label[rows], self.stages.entered(stage))]


def make_stream(config: StreamConfig, table: Table | None = None) -> Stream:
    """The stream named in the settings; it is always read again, because a table does not say what is held out."""
    stream = read_stream(config.data, config.schedule, holdout=config.holdout)
    if stream.table.weight is not None:
        raise ValueError("the losses of task ccd take no sample_weight; leave that column out of the manifest")
    return stream


def read_stream(data: str | Path, schedule: Schedule | str | Path = "paper", *, holdout: float = 0.1) -> Stream:
    """Read, check and stage a folder or manifest; `holdout` is the share of each class if the data has no test part."""
    schedule = schedule if isinstance(schedule, Schedule) else get_schedule(schedule)
    table, test, notes = _read(data)
    held_out = _draw_held_out(table, holdout, schedule.seed) if test is None else test
    label = table.label.copy()
    label[held_out] = -1
    stages = make_stages(label, table.classes, schedule)
    scored = (table.label >= 0) & (stages.entry[table.label] >= 0)  # a class in no stage cannot be scored
    return Stream(table, schedule, stages, held_out[scored[held_out]], (*notes, *_notes(table, stages)))


def _read(data: str | Path) -> tuple[Table, np.ndarray | None, tuple[str, ...]]:
    """The table, the rows of its test part if it has one, and remarks."""
    folder = Path(os.path.abspath(os.path.expanduser(data)))
    if is_cifar(folder):
        return read_cifar(folder)
    if is_cub(folder):
        return read_cub(folder)
    for child in visible_folders(folder) if folder.is_dir() else ():
        if is_cifar(child) or is_cub(child):
            raise ValueError(f"'{folder}' contains a data set; pass '{child}' itself")
    table = read_table(data)
    # domains are ignored, unless they have the usual names of parts: test images must not be trained on
    names = [name.lower() for name in table.domains]
    in_parts = "train" in names and set(names) - {"train"} <= HELD_OUT_NAMES
    return table, np.flatnonzero(table.domain != names.index("train")) if in_parts else None, ()


def _draw_held_out(table: Table, holdout: float, seed: int) -> np.ndarray:
    """A seeded share of every class, at least one image if it has two or more: rows, ascending."""
    rows = [np.array([], dtype=np.int64)]
    for c, name in enumerate(table.classes if holdout else ()):
        members = np.flatnonzero(table.label == c)
        number = max(int(holdout * len(members)), 1) if len(members) > 1 else 0
        rows.append(shuffled(members, name, seed, HELD_OUT_DRAW)[:number])
    return np.sort(np.concatenate(rows))


def _notes(table: Table, stages: Stages) -> Iterator[str]:
    classes = len(table.classes)
    if unlabelled := int((table.label < 0).sum()):
        yield f"{unlabelled:,} images have no label and are not used"
    if unused := [name for name, entry in zip(table.classes, stages.entry, strict=True) if entry < 0]:
        yield f"{len(unused)} of {classes} classes in no stage: {some_of(unused)}"
    entry = stages.entry[:, None]
    missed = (stages.counts == 0) & (np.arange(len(stages)) > entry) & (entry >= 0)  # a tiny class cannot be in all
    if missed.any():
        places = [f"{name} (not in {', '.join(map(str, np.flatnonzero(row)))})"
                  for name, row in zip(table.classes, missed, strict=True) if row.any()]  # fmt: skip
        yield f"{len(places)} of {classes} classes too small for all stages: {some_of(places)}"


# CIFAR-100


def is_cifar(folder: Path) -> bool:
    """Whether a folder looks like the official CIFAR-100, perhaps with a file missing; ValueError for its pickles."""
    if (folder / "meta").is_file() and any((folder / part).is_file() for part in OFFICIAL_IMAGES):
        raise ValueError(
            f"'{folder}' is the python version of CIFAR-100, whose pickles can run code and are not read: unpack the "
            "binary version, or convert this one with the ten lines in docs/study/ccd.md"
        )
    return (folder / CIFAR_NAMES).is_file() and any((folder / f"{part}.bin").is_file() for part in OFFICIAL_IMAGES)


def read_cifar(folder: Path) -> tuple[Table, np.ndarray, tuple[str, ...]]:
    """The images in the official order, as files in the user's cache; the rows of the test part; remarks."""
    files = [*(folder / f"{part}.bin" for part in OFFICIAL_IMAGES), folder / CIFAR_NAMES]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"'{folder}' lacks {', '.join(missing)}; unpack the binary version of CIFAR-100 again")
    classes = _class_names(folder / CIFAR_NAMES)
    parts = {file.stem: _records(file, len(classes)) for file in files[:2]}
    paths = tuple(f"{part}/{classes[record[1]]}/{i:05d}.png" for part, records in parts.items()
                  for i, record in enumerate(records))  # fmt: skip
    digest = hashlib.sha256()
    for source in files:
        with source.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    home = Path(os.path.abspath(cache_dir() / "cifar-100" / digest.hexdigest()[:16]))
    if not all(os.path.isfile(os.path.join(home, path)) for path in paths):
        with replacing_folder(home, sync=False) as temporary:
            for place in {os.path.dirname(path) for path in paths}:
                (temporary / place).mkdir(parents=True)
            images = (record[2:].reshape(3, 32, 32) for records in parts.values() for record in records)
            for path, pixels in zip(paths, images, strict=True):
                Image.fromarray(pixels.transpose(1, 2, 0)).save(temporary / path, compress_level=1)
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
    if not 0 < size <= MOST_BYTES or size % CIFAR_RECORD:
        raise ValueError(
            f"'{path}' has {size:,} bytes, which is not a whole number of records of {CIFAR_RECORD:,} bytes, at most "
            f"{MOST_BYTES:,}; unpack the binary version of CIFAR-100 again"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, CIFAR_RECORD)
    if (wrong := records[:, 1].max()) >= classes:
        raise ValueError(f"'{path}': fine labels go from 0 to {classes - 1} as in {CIFAR_NAMES}, but {wrong} occurs")
    return records

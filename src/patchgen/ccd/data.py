"""The data of continual category discovery: one labelled stage, then unlabelled stages with more and more classes.

    stream = read_stream("birds", "stages.yaml", holdout=0.2)       # birds/<class>/*.jpg
    stream.train[1]                                                 # rows whose labels only the scorer may read

Supported are the official CIFAR-100 and CUB-200-2011, whose test parts are held out; `<class>/*.jpg`;
`<domain>/<class>/*.jpg` and manifests, whose domains are ignored, unless they are `train` with `test` or `val`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchgen.ccd.cifar import OFFICIAL_IMAGES, cifar_table, is_cifar
from patchgen.ccd.settings import StreamConfig
from patchgen.ccd.stages import Schedule, Stages, get_schedule, make_stages, shuffled, some_of, write_stages
from patchgen.data.benchmarks import visible_folders
from patchgen.data.cub import is_cub, read_cub
from patchgen.data.listing import IMAGE_EXTENSIONS, is_image, list_images
from patchgen.data.table import Table, fingerprint, read_table

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
        write_stages(folder / "stages.csv", self.table, self.stages)

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


class _Source(NamedTuple):
    table: Table
    test: np.ndarray | None = None  # (N,) bool: the official test part; None if the data has none
    notes: tuple[str, ...] = ()


def read_stream(data: str | Path, schedule: Schedule | str | Path = "paper", *, holdout: float = 0.1) -> Stream:
    """Read, check and stage a folder or manifest; `holdout` is the share of each class if the data has no test part."""
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout is a share of each class, from 0 and below 1; got {holdout}")
    schedule = schedule if isinstance(schedule, Schedule) else get_schedule(schedule)
    table, test, notes = _read(Path(data))
    out = _draw_held_out(table, holdout, schedule.seed) if test is None else test
    stages = make_stages(np.where(out, -1, table.label), table.classes, schedule)
    scored = (table.label >= 0) & (stages.entry[table.label] >= 0)  # a class in no stage cannot be scored
    return Stream(table, schedule, stages, np.flatnonzero(out & scored), (*notes, *_notes(table, stages)))


def _read(data: Path) -> _Source:
    folder = Path(os.path.abspath(os.path.expanduser(data)))
    if folder.is_dir():
        if is_cifar(folder):
            return _read_cifar(folder)
        if is_cub(folder):
            cub = read_cub(folder)
            return _Source(cub.table, np.isin(np.arange(len(cub.table)), cub.test), cub.notes)
        children = visible_folders(folder)
        for child in children:
            if is_cifar(child) or is_cub(child):
                raise ValueError(f"'{folder}' contains a data set; pass '{child}' itself")
        holds_images = any(is_image(file.name) for child in children for file in child.iterdir())
        if holds_images and not any(visible_folders(child) for child in children):
            return _Source(_class_folders(folder, children))
    table = read_table(folder if folder.is_dir() else data, disjoint=True)
    # domains are ignored, unless they have the usual names of parts: test images must not be trained on
    names = [name.lower() for name in table.domains]
    in_parts = "train" in names and set(names) - {"train"} <= HELD_OUT_NAMES
    return _Source(table, table.domain != names.index("train") if in_parts else None)


def _read_cifar(folder: Path) -> _Source:
    train, test = cifar_table(folder, "train"), cifar_table(folder, "test")
    domain, label = (np.concatenate([getattr(part, name) for part in (train, test)]) for name in ("domain", "label"))
    both = Table(train.root, train.paths + test.paths, train.domains, train.classes, domain, label)
    here = {"train": len(train), "test": len(test)}
    parts = " and ".join(f"{here[part]:,} of {n:,} {part} images" for part, n in OFFICIAL_IMAGES.items())
    notes = () if here == OFFICIAL_IMAGES else (f"CIFAR-100: a subset, {parts}",)
    return _Source(both, np.arange(len(both)) >= len(train), notes)


def _class_folders(root: Path, folders: list[Path]) -> Table:
    """`<class>/<image>`, classes and files in sorted order."""
    images = {folder.name: list_images(folder) for folder in folders}
    if empty := [name for name, files in images.items() if not files]:
        kinds = " ".join(IMAGE_EXTENSIONS)
        raise ValueError(f"the class folder '{empty[0]}' in '{root}' holds no image ({kinds}); fill it, or remove it")
    paths = tuple(f"{name}/{file}" for name, files in images.items() for file in files)
    label = np.repeat(np.arange(len(images)), [len(files) for files in images.values()])
    return Table(root, paths, (root.name,), tuple(images), np.zeros(len(paths), dtype=np.int64), label)


def _draw_held_out(table: Table, holdout: float, seed: int) -> np.ndarray:
    """(N,) bool: a seeded share of every class, at least one image if it has two or more."""
    out = np.zeros(len(table), dtype=bool)
    for c, name in enumerate(table.classes if holdout else ()):
        rows = np.flatnonzero(table.label == c)
        number = max(int(holdout * len(rows)), 1) if len(rows) > 1 else 0
        out[shuffled(rows, name, seed, HELD_OUT_DRAW)[:number]] = True
    return out


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

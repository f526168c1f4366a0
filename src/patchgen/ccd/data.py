"""The data of continual category discovery: one labelled stage, then unlabelled stages with more and more classes.

Supported are the official CIFAR-100 and CUB-200-2011, whose test parts are held out; `<class>/*.jpg`;
`<domain>/<class>/*.jpg` and manifests, whose domains are ignored, unless they are `train` with `test` or `val`.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patchgen.ccd.cifar import is_cifar, read_cifar
from patchgen.ccd.settings import StreamConfig
from patchgen.ccd.stages import Schedule, Stages, get_schedule, make_stages, shuffled, some_of
from patchgen.common.files import write_csv
from patchgen.data.cub import is_cub, read_cub
from patchgen.data.image_files import visible_folders
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

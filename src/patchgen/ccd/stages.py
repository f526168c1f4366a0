"""A stream in stages: which images of which class appear at which stage, drawn by a schedule and recorded.

Stage 0 is labelled, later stages are not. Class group g enters at stage g; its images are distributed over that stage
and all later ones. A schedule in YAML:

    groups: [0.7, 0.1, 0.1, 0.1]       # shares of the classes in their order, or one list of class names per stage
    ratios:                            # row = class group, column = successive stages from the one where it enters
      - [0.87, 0.54, 0.5, 1.0]         # each ratio applies to the remaining images of a class, truncated
      - [0.7, 0.67, 1.0]
      - [0.9, 1.0]
      - [1.0]
    seed: 1
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import write_csv
from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import read_yaml, shortly
from patchgen.data.table import Table

COLUMNS = ("path", "label", "stage")
UNUSED = -1


@dataclass(frozen=True)
class Schedule:
    """Class groups, and the ratios by which each group's images are distributed over the stages."""

    groups: tuple[float, ...] | tuple[tuple[str, ...], ...]  # shares of the classes in order, or their names
    ratios: tuple[tuple[float, ...], ...]  # row g has one ratio for each of the stages g, g + 1, ..., the last
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("groups", "ratios"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        _check_groups(self.groups)
        _check_ratios(self.ratios, len(self.groups))
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
            raise ValueError(f"seed must be a non-negative whole number, got {shortly(self.seed)}")

    def group_of(self, class_names: Sequence[str]) -> np.ndarray:
        """The group of each class, (C,) int64; `UNUSED` if the schedule leaves a class out."""
        group = np.full(len(class_names), UNUSED, dtype=np.int64)
        if not isinstance(self.groups[0], tuple):
            ends = _group_ends(self.groups, len(class_names))  # type: ignore[arg-type]
            group[: ends[-1]] = np.searchsorted(ends, np.arange(ends[-1]), side="right")
            return group
        ids = {name: c for c, name in enumerate(class_names)}
        for g, members in enumerate(self.groups):
            for name in members:  # type: ignore[union-attr]
                if name not in ids:
                    hint = did_you_mean(name, class_names)
                    raise ValueError(f"group {g} names the class {shortly(name)}, which the data does not have{hint}")
                group[ids[name]] = g
        return group


@dataclass(frozen=True, eq=False)
class Stages:
    """The stage of every row, and the resulting stages of the classes."""

    stage: np.ndarray  # (N,) int64, UNUSED if a row is in no stage
    counts: np.ndarray  # (C,S) images of a class in a stage
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return self.counts.shape[1]

    @property
    def entry(self) -> np.ndarray:
        """The stage at which each class first appears, (C,) int64; `UNUSED` for a class in no stage."""
        there = self.counts > 0
        return np.where(there.any(axis=1), there.argmax(axis=1), UNUSED)

    @property
    def absent(self) -> dict[str, tuple[int, ...]]:
        """Classes that are missing from later stages, and which: tiny classes cannot be in all of them."""
        missed = (self.counts == 0) & (np.arange(len(self)) > self.entry[:, None]) & (self.entry[:, None] >= 0)
        return {self.class_names[c]: tuple(np.flatnonzero(missed[c]).tolist()) for c in np.flatnonzero(missed.any(1))}

    def rows(self, stage: int) -> np.ndarray:
        """Row indices of a stage, ascending."""
        return np.flatnonzero(self.stage == stage)

    def entered(self, stage: int) -> np.ndarray:
        """Ids of the classes that have appeared up to a stage; their number is the K of that stage."""
        return np.flatnonzero((self.entry >= 0) & (self.entry <= stage))


def get_schedule(name: str | Path) -> Schedule:
    """A named schedule, or one in a YAML file."""
    if str(name) in SCHEDULES:
        return SCHEDULES[str(name)]
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        return read_schedule(name)
    hint = did_you_mean(str(name), SCHEDULES)
    raise ValueError(f"no schedule is called '{name}'{hint} (known: {', '.join(SCHEDULES)}, or name a .yaml file)")


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from YAML; raises ValueError with the fix if it is invalid."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no schedule file '{path}'")
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise ValueError(f"'{path}' must hold the keys groups and ratios, found {type(settings).__name__}")
    known = [f.name for f in fields(Schedule)]
    for key in settings:
        if key not in known:
            hint = did_you_mean(str(key)[:100], known)
            raise ValueError(f"'{path}': unknown key {shortly(key)}{hint} (known: {', '.join(known)})")
    if lost := [key for key in ("groups", "ratios") if key not in settings]:
        raise ValueError(f"'{path}': the keys {', '.join(lost)} are missing")
    try:
        return Schedule(**settings)
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from error


def stage_sizes(images: int, ratios: Sequence[float]) -> list[int]:
    """Number of a class's images in its successive stages: 500 with the paper's first row -> 435, 35, 15, 15.

    Each ratio applies to the remaining images, truncated; the first stage gets at least one image of every class.
    """
    sizes: list[int] = []
    for ratio in ratios:
        left = images - sum(sizes)
        sizes.append(int(ratio * left) if sizes else max(int(ratio * left), min(left, 1)))
    return sizes


def shuffled(rows: np.ndarray, class_name: str, seed: int, *purpose: int) -> np.ndarray:
    """Rows of a class in an order that depends only on the seed and the class's name, not on other classes."""
    # normalise the name: file systems compose accents differently
    name = unicodedata.normalize("NFC", class_name).encode("utf-8", "surrogateescape")
    digest = int.from_bytes(hashlib.sha256(name).digest()[:8], "little")
    # raw output: numpy freezes the stream of a bit generator, but not that of `permutation`
    keys = np.random.default_rng([seed, digest, *purpose]).bit_generator.random_raw(len(rows))
    return rows[np.argsort(keys, kind="stable")]


def make_stages(label: np.ndarray | Sequence[int], class_names: Sequence[str], schedule: Schedule) -> Stages:
    """Distribute the images of every class over the stages.

    Args:
        label: (N,) class ids; -1 for rows that are not used.
        class_names: the C classes in the data set's order, to which the shares refer.
    """
    ids, names = np.asarray(label), tuple(class_names)
    group = schedule.group_of(names)
    stage = np.full(len(ids), UNUSED, dtype=np.int64)
    for c in np.flatnonzero(group >= 0):
        rows = shuffled(np.flatnonzero(ids == c), names[c], schedule.seed)
        sizes = stage_sizes(len(rows), schedule.ratios[group[c]])
        stage[rows[: sum(sizes)]] = np.repeat(np.arange(group[c], len(schedule.groups)), sizes)
    counts = np.zeros((len(names), len(schedule.groups)), dtype=np.int64)
    np.add.at(counts, (ids[stage >= 0], stage[stage >= 0]), 1)
    stages = Stages(stage, counts, names)
    for g in range(len(schedule.groups)):
        members = [names[c] for c in np.flatnonzero(group == g)]
        if not stages.counts[group == g].any():
            raise ValueError(f"no class of group {g} ({some_of(members)}) has an image to train on; add some")
    return stages


def write_stages(path: str | Path, table: Table, stages: Stages) -> None:
    """Write one CSV line per row of the table: its path, its class and its stage (-1: in none)."""
    rows = ((table.paths[i], table.label_name(i), str(stage)) for i, stage in enumerate(stages.stage))
    write_csv(path, COLUMNS, rows)


def _group_ends(shares: Sequence[float], classes: int) -> np.ndarray:
    """End of each group among the classes, (S,): cumulative shares, rounded, at least one class per group."""
    groups = len(shares)
    if classes < groups:
        raise ValueError(f"{groups} class groups need at least as many classes, the data has {classes}")
    ends = [round(math.fsum(shares[: g + 1]) * classes) for g in range(groups)]
    last = max(ends[-1], groups)
    for g in range(groups):
        ends[g] = min(max(ends[g], ends[g - 1] + 1 if g else 1), last - (groups - 1 - g))  # one class for each after g
    return np.array(ends)


def _check_groups(groups: Any) -> None:
    if not isinstance(groups, tuple) or len(groups) < 2:
        raise ValueError(f"groups must list two or more class groups, the labelled one first; got {shortly(groups)}")
    named = [isinstance(group, tuple) for group in groups]
    if any(named) and not all(named):
        raise ValueError(f"groups must be all shares or all lists of class names, got {shortly(groups)}")
    if all(named):
        _check_names(groups)
        return
    for share in groups:
        if not _is_number(share) or not 0 < share <= 1:
            rule = "a share of the classes is a number above 0 and at most 1"
            raise ValueError(f"{rule}, got {shortly(share)} in {shortly(groups)}")
    if (total := math.fsum(groups)) > 1 + 1e-9:
        raise ValueError(f"the shares of the classes must not exceed 1 together; {shortly(groups)} make {total:g}")


def _check_names(groups: Sequence[Sequence[Any]]) -> None:
    first: dict[str, int] = {}
    for g, members in enumerate(groups):
        if not members:
            raise ValueError(f"group {g} names no class; name some, or leave the group and its row of ratios out")
        for name in members:
            if not isinstance(name, str):
                raise ValueError(f"class names must be text, got {shortly(name)} in group {g}; put it in quotes")
            if first.setdefault(name, g) != g or members.count(name) > 1:
                raise ValueError(f"class {shortly(name)} is in group {first[name]} and again in group {g}; keep one")


def _check_ratios(ratios: Any, groups: int) -> None:
    if not isinstance(ratios, tuple) or len(ratios) != groups:
        rows = len(ratios) if isinstance(ratios, tuple) else repr(ratios)
        raise ValueError(f"ratios must have one row for each of the {groups} class groups, got {rows}")
    for g, row in enumerate(ratios):
        if not isinstance(row, tuple) or len(row) != groups - g:
            rule = f"row {g} of ratios must have {groups - g} numbers, one for each stage from {g} to {groups - 1}"
            raise ValueError(f"{rule}; got {shortly(list(row) if isinstance(row, tuple) else row)}")
        for column, ratio in enumerate(row):
            if not _is_number(ratio) or not 0 <= ratio <= 1 or (column == 0 and ratio == 0):
                rule = f"a share of what is left, {'above 0' if column == 0 else 'from 0'} to 1"
                raise ValueError(f"row {g} of ratios: {rule}, cannot be {shortly(ratio)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def some_of(names: Iterable[str]) -> str:
    """The first few names and how many more there are, for messages."""
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


# PromptCCD's protocol, which PatchGen's table follows: 70 % of the classes are labelled, three equal groups enter later
SCHEDULES: dict[str, Schedule] = {
    "paper": Schedule(
        groups=(0.7, 0.1, 0.1, 0.1), ratios=((0.87, 0.54, 0.50, 1.0), (0.70, 0.67, 1.0), (0.90, 1.0), (1.0,))
    )
}

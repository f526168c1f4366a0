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

import hashlib
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import broken_rule, read_yaml, shortly

UNUSED = -1


@dataclass(frozen=True)
class Schedule:
    """Class groups, and the ratios by which each group's images are distributed over the stages."""

    groups: tuple[float, ...] | tuple[tuple[str, ...], ...]  # shares of the classes in order, or their names
    ratios: tuple[tuple[float, ...], ...]  # row g has one ratio for each of the stages g, g + 1, ..., the last
    seed: int = 1

    def __post_init__(self) -> None:
        groups, ratios = self.groups, self.ratios
        for name, hint, most in (
            ("groups", list[float] | list[list[str]], 1),
            ("ratios", list[list[float]], 1),
            ("seed", int, math.inf),
        ):
            if rule := broken_rule(value := getattr(self, name), hint, (0, most)):
                fix = "; put class names in quotes" * (name == "groups")
                raise ValueError(f"{name} must be {rule}, not {shortly(value)}{fix}")
        if groups and isinstance(groups[0], (list, tuple)):
            names = [name for members in groups for name in members]  # type: ignore[union-attr]
            fits = all(groups) and len(set(names)) == len(names)
        else:
            fits = 0 not in groups and math.fsum(groups) <= 1 + 1e-9  # type: ignore[arg-type]
        if not fits or len(groups) < 2:
            raise ValueError(
                "groups must list two or more groups, the labelled one first: shares of the classes above 0 and at "
                f"most 1 together, or names of classes, each in one group, not {shortly(groups)}"
            )
        if [len(row) for row in ratios] != list(range(len(groups), 0, -1)) or any(row[0] == 0 for row in ratios):
            raise ValueError(
                f"ratios must have a row for each of the {len(groups)} class groups, with one number above 0 for the "
                f"stage where the group enters and one for each later stage, not {shortly(ratios)}"
            )
        for name in ("groups", "ratios"):
            rows = getattr(self, name)
            object.__setattr__(self, name, tuple(tuple(row) if isinstance(row, list) else row for row in rows))

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

    def __len__(self) -> int:
        return self.counts.shape[1]

    @property
    def entry(self) -> np.ndarray:
        """The stage at which each class first appears, (C,) int64; `UNUSED` for a class in no stage."""
        there = self.counts > 0
        return np.where(there.any(axis=1), there.argmax(axis=1), UNUSED)

    def rows(self, stage: int) -> np.ndarray:
        """Row indices of a stage, ascending."""
        return np.flatnonzero(self.stage == stage)

    def entered(self, stage: int) -> np.ndarray:
        """Ids of the classes that have appeared up to a stage; their number is the K of that stage."""
        return np.flatnonzero((self.entry >= 0) & (self.entry <= stage))


def get_schedule(name: str | Path) -> Schedule:
    """A named schedule, or one in a YAML file; raises ValueError with the fix."""
    if str(name) in SCHEDULES:
        return SCHEDULES[str(name)]
    if Path(name).suffix.lower() not in (".yaml", ".yml"):
        hint = did_you_mean(str(name), SCHEDULES)
        raise ValueError(f"no schedule is called '{name}'{hint} (known: {', '.join(SCHEDULES)}, or name a .yaml file)")
    settings = read_yaml(name)
    try:
        keys = settings.keys() if isinstance(settings, dict) else set()
        if not {"groups", "ratios"} <= keys <= {"groups", "ratios", "seed"}:
            raise ValueError(f"it must hold the keys groups and ratios, and may hold seed, not {shortly(settings)}")
        return Schedule(**settings)
    except ValueError as error:
        raise ValueError(f"'{name}': {error}") from error


def stage_sizes(images: int, ratios: Sequence[float]) -> list[int]:
    """Number of a class's images in its successive stages: 500 with the paper's first row -> 435, 35, 15, 15."""
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
    """Distribute the images of every class over the stages; label (N,) is -1 for rows that are not used."""
    ids, names = np.asarray(label), tuple(class_names)
    group = schedule.group_of(names)
    stage = np.full(len(ids), UNUSED, dtype=np.int64)
    for c in np.flatnonzero(group >= 0):
        rows = shuffled(np.flatnonzero(ids == c), names[c], schedule.seed)
        sizes = stage_sizes(len(rows), schedule.ratios[group[c]])
        stage[rows[: sum(sizes)]] = np.repeat(np.arange(group[c], len(schedule.groups)), sizes)
    counts = np.zeros((len(names), len(schedule.groups)), dtype=np.int64)
    np.add.at(counts, (ids[stage >= 0], stage[stage >= 0]), 1)
    for g in range(len(schedule.groups)):
        if not counts[group == g].any():
            members = some_of(names[c] for c in np.flatnonzero(group == g))
            raise ValueError(f"no class of group {g} ({members}) has an image to train on; add some")
    return Stages(stage, counts)


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

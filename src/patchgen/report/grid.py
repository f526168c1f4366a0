"""A table whose cells record their provenance: runs, seeds, selection rule, images.

A cell is a mean over seeds of a mean over data sets of a mean over unseen domains. If a fold was run with several
learning rates or loss weights, the best run on source validation counts, seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from patchgen.report.reference import Row
from patchgen.runs.scores import Run, Score

SPLITS = {
    "in": "80 % of the unseen domain", "all": "the whole unseen domain",
    "transductive": "images of the session itself", "held_out": "images never trained on",
}  # fmt: skip
BOUNDS = ("true-mask", "all-labels")  # in the names of methods with information that others lack


@dataclass(frozen=True)
class Number:
    """A mean over seeds, in per cent."""

    by_seed: Mapping[int, float]
    runs: tuple[str, ...]
    images: int  # scored in one seed, over all folds
    select: str  # selection rule of checkpoints
    split: str  # a key of SPLITS
    tried: int = 1  # maximum number of settings per fold

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def error(self) -> float | None:
        """Standard error over seeds; None with one."""
        values = list(self.by_seed.values())
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    def in_words(self) -> str:
        """The provenance of a cell in words."""
        error = "" if self.error is None else f" ± {self.error:.2f} (standard error)"
        seeds = ", ".join(map(str, self.by_seed))
        tried = f"; of {self.tried} settings, by source validation" if self.tried > 1 else ""
        return (
            f"{self.mean:.2f}{error}; seeds {seeds}; {self.images} images, {SPLITS[self.split]}; checkpoint by "
            f"{self.select}{tried}; runs {', '.join(self.runs)}"
        )


@dataclass(frozen=True)
class Entry:
    """One cell: our number, the paper's, or the command that fills it."""

    number: Number | None = None
    paper: Row | None = None
    command: str = ""

    @property
    def missing(self) -> bool:
        return self.number is None and bool(self.command)


@dataclass(frozen=True)
class Column:
    """What a column averages: the unseen domains of each data set."""

    heading: str
    over: Mapping[str, Sequence[str]]  # data set -> domains
    metric: str = "accuracy"
    checkpoint: str = "selected"
    group: str = ""  # a second line above the headings
    key: tuple[str, str] = ("", "")  # the paper's (data set, domain); empty where it has no such number
    paper: bool = False  # shows the paper's number alone


@dataclass(frozen=True)
class Line:
    label: str
    entries: tuple[Entry, ...]
    paper: bool = False  # a line of the paper's table
    rerun: bool = False  # starred there
    block: str = ""  # a heading above the lines that share it


@dataclass(frozen=True)
class Grid:
    name: str  # of its files
    title: str
    setup: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    split: str  # a key of SPLITS
    notes: tuple[str, ...] = ()
    kind: str = ""  # which figure it gets
    first: str = "method"  # heading of the labels

    @cached_property
    def seeds(self) -> int:
        """The maximum number of seeds of a cell: others state how many they have."""
        found = [len(e.number.by_seed) for line in self.lines for e in line.entries if e.number]
        return max(found, default=1)

    def is_best(self, entry: Entry) -> bool:
        """Whether a cell leads its column by more than the error of the difference."""
        return id(entry) in self._best

    @cached_property
    def _best(self) -> frozenset[int]:
        """The leading cells, by identity; upper bounds and values of masks are excluded."""
        lines = [line for line in self.lines if not line.paper and not any(word in line.label for word in BOUNDS)]
        columns = [i for i, column in enumerate(self.columns) if not column.metric.startswith("mask:")]
        leaders = (_leader([line.entries[i] for line in lines]) for i in columns)
        return frozenset(id(entry) for entry in leaders if entry is not None)

    def commands(self) -> dict[str, list[str]]:
        """Command -> the cells that it fills."""
        wanted: dict[str, list[str]] = {}
        for line in self.lines:
            for column, entry in zip(self.columns, line.entries, strict=True):
                if entry.missing:
                    heading = " ".join(filter(None, (column.group, column.heading)))
                    wanted.setdefault(entry.command, []).append(f"{line.label}: {heading}")
        return wanted


def _leader(entries: Sequence[Entry]) -> Entry | None:
    """The cell that is better than every other one, each by more than chance; None if there is none."""
    rivals = [(entry, entry.number) for entry in entries if entry.number and entry.number.select != "oracle"]
    if len(rivals) < 2:
        return None
    best, number = max(rivals, key=lambda rival: rival[1].mean)
    return best if all(is_beyond_error(number, other) for entry, other in rivals if entry is not best) else None


def is_beyond_error(one: Number, other: Number) -> bool:
    """Whether `one` is higher than `other` by more than the 95 % interval of the difference, paired over seeds.

    Needs at least two common seeds.
    """
    from scipy.stats import t

    gaps = [one.by_seed[seed] - other.by_seed[seed] for seed in one.by_seed.keys() & other.by_seed.keys()]
    if len(gaps) < 2:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return statistics.fmean(gaps) > t.ppf(0.975, len(gaps) - 1) * error


def gather(runs: Sequence[Run], column: Column, part: str) -> Number | None:
    """The number that the runs of one line have for a column; None if no seed has every fold."""
    folds = {(d, u): _best(runs, d, u, column, part) for d, domains in column.over.items() for u in domains}
    seeds = sorted(set.intersection(*(set(found) for found in folds.values()))) if folds else []
    if not seeds:
        return None
    chosen = {seed: {key: found[seed] for key, found in folds.items()} for seed in seeds}
    by_seed = {seed: 100 * _nested(found, column) for seed, found in chosen.items()}
    used = [pick.run for found in chosen.values() for pick in found.values()]
    config = used[0].config
    return Number(
        by_seed,
        tuple(dict.fromkeys(run.path.name for run in used)),
        sum(pick.score.images for pick in chosen[seeds[0]].values()),
        getattr(config, config.selection_rule),
        part,
        max(pick.tried for found in chosen.values() for pick in found.values()),
    )


@dataclass(frozen=True)
class _Pick:
    run: Run
    score: Score
    tried: int = 1


def _best(runs: Sequence[Run], dataset: str, domain: str, column: Column, part: str) -> dict[int, _Pick]:
    """Seed -> the best run on source validation."""
    found: dict[int, _Pick] = {}
    wanted = (domain, column.metric, column.checkpoint, part)
    for run in (r for r in runs if r.dataset == dataset):
        for score in run.scores:
            if (score.domain, score.metric, score.checkpoint, score.part) != wanted:
                continue
            old = found.get(run.config.seed, _Pick(run, score, 0))
            best = _Pick(run, score) if run.validation > old.run.validation else old
            found[run.config.seed] = replace(best, tried=old.tried + 1)
    return found


def _nested(found: Mapping[tuple[str, str], _Pick], column: Column) -> float:
    """Mean over data sets of the mean over domains."""
    means = [statistics.fmean(found[d, u].score.value for u in domains) for d, domains in column.over.items()]
    return statistics.fmean(means)


def fill(
    runs: Sequence[Run], columns: Sequence[Column], part: str, command: Callable[[Column], str]
) -> tuple[Entry, ...]:
    """A line's cells; missing ones get the command that fills them."""
    entries = []
    for column in columns:
        number = None if column.paper else gather(runs, column, part)
        entries.append(Entry(number, command="" if number or column.paper else command(column)))
    return tuple(entries)

"""A table whose cells record their provenance: runs, seeds, selection rule, images.

A cell is a mean over seeds of a mean over data sets of a mean over unseen domains. If a fold was run with several
learning rates or loss weights, the best run on source validation counts, seed by seed.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import pandas as pd

from patchgen.common.text import markdown, name_key, plus_minus
from patchgen.report.reference import Row

SPLITS = {
    "in": "80 % of the unseen domain", "all": "the whole unseen domain",
    "transductive": "images of the session itself", "held_out": "images never trained on",
}  # fmt: skip
BOUNDS = ("true-mask", "all-labels")  # in the names of methods with information that others lack
Over = Literal["seeds", "folds", "folds x seeds"]  # what a ± is taken over


@dataclass(frozen=True)
class Number:
    """A mean and its standard error."""

    values: Mapping[Hashable, float]  # seed -> its mean over folds; in a mean over folds: fold -> its mean over seeds
    runs: tuple[str, ...] = ()
    images: int = 0  # scored in one seed, over all folds
    select: str = ""  # selection rule of checkpoints
    split: str = "all"  # a key of SPLITS
    tried: int = 1  # maximum number of settings per fold
    over: Over = "seeds"

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def error(self) -> float | None:
        """Standard error; None with one value."""
        values = list(self.values.values())
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    def text(self, seeds: int = 1, digits: int = 1) -> str:
        """`84.1 ± 0.3`, with the number of seeds if a cell has fewer than the others."""
        few = self.over == "seeds" and len(self.values) < seeds
        return plus_minus(self.mean, self.error, digits) + f" ({len(self.values)} of {seeds} seeds)" * few

    def provenance(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2f} (standard error over {self.over})"
        rule = self.select if self.select == "leave-one-out" else "source validation"
        tried = f"; of {self.tried} settings, by {rule}" if self.tried > 1 else ""
        return (
            f"{self.mean:.2f}{error}; {self.over} {', '.join(map(str, self.values))}; {self.images} images, "
            f"{SPLITS[self.split]}; checkpoint by {self.select}{tried}; runs {', '.join(self.runs)}"
        )


@dataclass(frozen=True, eq=False)
class Entry:
    """One cell: our number, the paper's, or the command that fills it; or only a text."""

    number: Number | None = None
    paper: Row | None = None
    command: str = ""
    text: str = ""

    @property
    def missing(self) -> bool:
        return self.number is None and bool(self.command)

    @property
    def paper_text(self) -> str:
        return plus_minus(self.paper.value, self.paper.error) if self.paper else ""


@dataclass(frozen=True)
class Column:
    """What a column averages: the unseen domains of each data set."""

    heading: str
    folds: Mapping[str, Sequence[str]]  # data set -> domains
    metric: str = "accuracy"
    checkpoint: str = "selected"
    group: str = ""  # a second line above the headings
    key: tuple[str, str] = ("", "")  # the paper's (data set, domain); empty where it has no such number
    paper: bool = False  # shows the paper's number alone
    over: Over = "seeds"
    scale: float = 100.0
    digits: int = 1

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.group, self.heading)))

    def printed(self, rows: Sequence[Row]) -> Row | None:
        """The paper's number for this column, among the rows of one method and backbone."""
        wanted = (row for row in rows if row.metric == self.metric and row.swad == (self.checkpoint == "swad"))
        place = tuple(map(name_key, self.key))
        return next((row for row in wanted if (name_key(row.dataset), name_key(row.domain)) == place), None)


@dataclass(frozen=True)
class Line:
    label: str
    entries: tuple[Entry, ...]
    paper: bool = False  # a line of the paper's table
    rerun: bool = False  # starred there
    block: str = ""  # a heading above the lines that share it

    @property
    def title(self) -> str:
        return f"paper: {self.label}{'*' * self.rerun}" if self.paper else self.label


@dataclass(frozen=True)
class Grid:
    name: str  # of its files
    title: str
    setup: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    kind: str = ""  # which figure it gets
    first: str = "method"  # heading of the labels
    asked_seeds: int = 0

    @cached_property
    def numbers(self) -> list[Number]:
        return [entry.number for line in self.lines for entry in line.entries if entry.number]

    @cached_property
    def seeds(self) -> int:
        """The maximum number of seeds of a cell: others state how many they have."""
        return self.asked_seeds or max((len(n.values) for n in self.numbers if n.over == "seeds"), default=1)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """(heading above the columns, how many columns it spans)."""
        return [(name, len(list(columns))) for name, columns in groupby(self.columns, key=lambda column: column.group)]

    def text(self, column: Column, entry: Entry) -> str:
        return entry.number.text(self.seeds, column.digits) if entry.number else entry.text

    def error_note(self) -> str:
        """What a ± is over; empty if there is none."""
        kinds = list(dict.fromkeys(number.over for number in self.numbers if number.error is not None))
        if not kinds:
            return ""
        others = [f"; in {c.heading}, over {c.over}" for c in self.columns if c.over != kinds[0] and c.over in kinds]
        return f"± is the standard error over {kinds[0]}{''.join(others)}."

    @cached_property
    def best(self) -> frozenset[Entry]:
        """The cells that lead their column by more than chance; without upper bounds and values of masks."""
        lines = [line for line in self.lines if not line.paper and not any(word in line.label for word in BOUNDS)]
        leaders = set()
        for i in (i for i, column in enumerate(self.columns) if not column.metric.startswith("mask:")):
            rivals = {line.entries[i]: number for line in lines
                      if (number := line.entries[i].number) and number.select != "oracle"}  # fmt: skip
            leader = max(rivals, key=lambda entry: rivals[entry].mean, default=None)
            others = [number for entry, number in rivals.items() if entry is not leader]
            if leader and others and all(is_beyond_error(rivals[leader], number) for number in others):
                leaders.add(leader)
        return frozenset(leaders)

    @cached_property
    def commands(self) -> dict[str, int]:
        """The commands that fill missing cells, numbered from 1."""
        commands = dict.fromkeys(entry.command for line in self.lines for entry in line.entries if entry.missing)
        return {command: number for number, command in enumerate(commands, 1)}

    @property
    def head(self) -> list[str]:
        return [self.first, *(column.title for column in self.columns)]

    def cells(
        self, line: Line, best: str = "{}", paper: str = "{}", missing: str = "", escape: Callable[[str], str] = str
    ) -> list[str]:
        """A line's texts: ours, or the number of a missing number's command, and the paper's; `{}` is their place."""
        texts = []
        for column, entry in zip(self.columns, line.entries, strict=True):
            mark = missing or f"[{self.commands.get(entry.command)}]"
            ours = escape(mark if entry.missing else self.text(column, entry))
            ours = best.format(ours) if entry in self.best else ours
            texts.append(" ".join(filter(None, (ours, paper.format(escape(entry.paper_text)) if entry.paper else ""))))
        return texts

    def markdown(self) -> str:
        """Our numbers alone, without title and notes."""
        return markdown(self.head, [[line.label, *self.cells(line)] for line in self.lines])


def is_beyond_error(higher: Number, lower: Number) -> bool:
    """Whether the difference, paired over common seeds, exceeds its 95 % interval."""
    from scipy.stats import t

    seeds = higher.values.keys() & lower.values.keys()
    gaps = Number({seed: higher.values[seed] - lower.values[seed] for seed in seeds})
    return len(seeds) > 1 and gaps.mean > t.ppf(0.975, len(seeds) - 1) * (gaps.error or 0)


Best = Mapping[tuple[str, ...], Mapping[Hashable, Any]]  # FOLD -> seed -> row of the frame, with `tried`
FOLD = ["metric", "checkpoint", "part", "data", "unseen"]


def best_runs(scores: pd.DataFrame) -> Best:
    """The scores of one line: of each number, fold and seed those of the best run on source validation."""
    tried = scores.groupby([*FOLD, "seed"])["value"].transform("size")
    ranked = scores.assign(tried=tried).sort_values("validation", ascending=False, kind="stable")
    best: dict[tuple[str, ...], dict[Hashable, Any]] = defaultdict(dict)
    row: Any  # a named tuple of the columns
    for row in ranked.drop_duplicates([*FOLD, "seed"]).sort_values("seed", kind="stable").itertuples():
        best[row.metric, row.checkpoint, row.part, row.data, row.unseen][row.seed] = row
    return best


def gather(best: Best, column: Column, part: str) -> Number | None:
    """The number that a line has for a column; None if no seed has every fold."""
    folds = [(data, best.get((column.metric, column.checkpoint, part, data, domain), {}))
             for data, domains in column.folds.items() for domain in domains]  # fmt: skip
    used: list[Any] = []
    values: dict[Hashable, float] = {}
    if column.over == "folds" and all(rows for _, rows in folds):
        used = [row for _, rows in folds for row in rows.values()]
        values = {i: statistics.fmean(row.value for row in rows.values()) for i, (_, rows) in enumerate(folds)}
    elif column.over == "seeds" and folds:
        for seed in (seed for seed in folds[0][1] if all(seed in rows for _, rows in folds)):
            used += [rows[seed] for _, rows in folds]
            of_data: dict[str, list[float]] = defaultdict(list)
            for data, rows in folds:
                of_data[data].append(rows[seed].value)
            values[seed] = statistics.fmean(map(statistics.fmean, of_data.values()))
    if not values:
        return None
    values = {name: column.scale * value for name, value in values.items()}
    runs, images = tuple(dict.fromkeys(row.run for row in used)), sum(row.images for row in used[: len(folds)])
    return Number(values, runs, images, used[0].selected_by, part, max(row.tried for row in used), column.over)


def fill(
    scores: pd.DataFrame, columns: Sequence[Column], part: str, command: Callable[[Column], str] = lambda column: "",
    printed: Sequence[Row] = (),
) -> tuple[Entry, ...]:  # fmt: skip
    """A line's cells, from its scores; missing ones get the command that fills them, the paper's columns `printed`."""
    best, entries = best_runs(scores), []
    for column in columns:
        number = None if column.paper else gather(best, column, part)
        paper = column.printed(printed) if column.paper else None
        entries.append(Entry(number, paper, "" if number or column.paper else command(column)))
    return tuple(entries)


def unequal_terms(labels: Collection[str]) -> list[str]:
    """Notes on sums such as `patchgen+entropy` that stand beside a baseline without the term."""
    sums: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        base, _, terms = label.removesuffix(" + SWAD").partition(",")[0].partition("+")
        if base.startswith("patchgen") and terms:
            sums[terms].append(label)
    plain = [name for name in ("lp-ln", "lp-ln@mean", "lp", "full") if name in labels]
    return [
        f"Not an equal comparison: {' and '.join(names)} with {terms}, {plain[0]} without; train {plain[0]}+{terms}."
        for terms, names in sums.items()
        if plain and not any(f"{name}+{terms}" in labels for name in plain)
    ]

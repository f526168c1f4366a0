"""Multi-domain generalisation: train on all domains but one, select on held-out source images, score the unseen one.

Training uses the "in" part of the source domains, validation their "out" part. The unseen domain is scored as a whole
and, as usual in the literature, on its "in" part (80 %). Without an unseen domain (`none`) nothing is scored.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.text import did_you_mean
from patchgen.config import NO_DOMAIN, Config
from patchgen.data.benchmarks import BENCHMARKS, Benchmark
from patchgen.data.splits import Splits, make_splits, write_splits
from patchgen.data.table import Table, check_shared, fingerprint, read_table
from patchgen.tasks.metrics import class_counts, scores


@dataclass(frozen=True)
class Fold:
    """The rows of one leave-one-domain-out fold. Training and selection read only ``target``, the scorer ``truth``."""

    table: Table
    splits: Splits
    unseen: str
    train: dict[int, np.ndarray]  # source domain id -> rows
    validation: dict[str, np.ndarray]  # source domain name -> rows
    test: dict[str, np.ndarray]  # "in" and "out" part of the unseen domain -> rows; empty if none is left out
    target: np.ndarray  # (N,) the target output; -1 if hidden from training
    truth: np.ndarray  # (N,) the true class, known classes first; validation rows have the same target
    classes: tuple[str, ...]  # names of the classifier's outputs
    metric: str = "accuracy"  # for selecting checkpoints
    positive: int | None = None  # the class of the benchmark's F1; None: F1 is the mean over classes

    def fingerprint(self) -> str:
        """Digest of the data that names the run."""
        return fingerprint(self.table)

    def write_rows(self, folder: Path) -> None:
        """Which image is trained on, validated on and scored: `splits.csv`."""
        write_splits(folder / "splits.csv", self.table, self.splits)

    def balanced_weights(self) -> np.ndarray:
        """(C,) class weights: labelled classes get equal shares of the loss in domain-balanced batches, with mean 1."""
        labels = [self.target[rows] for rows in self.train.values()]
        shares = [np.bincount(own[own >= 0], minlength=len(self.classes)) / max((own >= 0).sum(), 1) for own in labels]
        share = np.mean([one for one in shares if one.any()], axis=0)  # (C,)
        return np.divide(1, share * (share > 0).sum(), out=np.ones_like(share), where=share > 0).astype(np.float32)

    def sample_weights(self) -> np.ndarray | None:
        """(N,) weights of the images, with mean 1 over domain-balanced batches; None if all are equal."""
        weight = self.table.weight
        if weight is None:
            return None
        labelled = [weight[rows[self.target[rows] >= 0]] for rows in self.train.values()]
        if len(np.unique(np.concatenate(labelled))) == 1:
            return None
        mean = np.mean([own.mean() for own in labelled if len(own)])
        return (weight / mean).astype(np.float32)

    @property
    def benchmark(self) -> Benchmark | None:
        return BENCHMARKS.get(self.table.benchmark or "")

    @property
    def uncovered(self) -> list[str]:
        """Classes of the unseen domain that no source has: they cannot be learned, and are reported separately."""
        counts = self.table.counts()
        sources = {c for domain, row in counts.items() if domain != self.unseen for c, n in row.items() if n}
        return [c for c, n in counts[self.unseen].items() if n and c not in sources] if self.test else []

    @property
    def notes(self) -> tuple[str, ...]:
        weights = self.sample_weights()
        weighted = () if weights is None else (
            f"images are weighted: sample_weight is {weights.min():.3g} to {weights.max():.3g} times its mean",
        )  # fmt: skip
        return (*weighted, *_group_notes(self))

    @property
    def num_known(self) -> int:
        """Classes that training may learn by name; they come first."""
        return len(self.table.classes)

    @property
    def size(self) -> int:
        """Side of a confusion matrix of true classes and outputs."""
        return max(len(self.classes), len(self.table.classes))

    def scores(self, confusion: np.ndarray) -> dict[str, Any]:
        """The scores of a test record, from a confusion matrix (true x predicted)."""
        recall = zip(self.table.classes, class_counts(confusion)["recall"], strict=False)
        record: dict[str, Any] = {**scores(confusion, self.positive)}
        record["per_class"] = {name: value for name, value in recall if value is not None}
        if without := self.uncovered:  # once: all rows are counted for it
            rows = ~np.isin(self.table.classes, without)[:, None]
            record["covered"] = {"without": without, **scores(confusion * rows, self.positive)}
        return record


def _group_notes(fold: Fold) -> Iterator[str]:
    """Groups (patients) on both sides of a split, or in several domains, each of which is split separately."""
    group, by_group = fold.table.group, fold.splits.rule == "group"
    if group is None:
        return

    def groups(parts: Iterable[np.ndarray]) -> set[str]:
        return {group[row] for rows in parts for row in rows.tolist()}

    sides = ((rows, fold.validation[fold.table.domains[domain]]) for domain, rows in fold.train.items())
    torn = [name for rows, held_out in sides for name in sorted(groups([rows]) & groups([held_out]))]
    if torn and not by_group:
        yield (
            f"the split puts {len(torn):,} groups on both sides of their domain ({torn[0]}): validation scores are too "
            "optimistic. Keep patients together with --split group"
        )
    train, validation, test = (groups(part.values()) for part in (fold.train, fold.validation, fold.test))
    advice = "if they are the same patients, the score is too optimistic; otherwise make the names unique"
    if both := sorted(test & (train | validation)):
        yield f"{len(both)} of {len(test)} groups of {fold.unseen} also occur in the sources ({both[0]}): {advice}"
    if by_group and (both := sorted(train & validation)):
        yield f"{len(both)} groups are trained on in one source and validated on in another ({both[0]}): {advice}"


def make_fold(config: Config, table: Table | None = None) -> Fold:
    table = table or read_table(config.data, benchmark=config.benchmark, options=config.options)
    check_shared(table)
    if leaves_out(config, table.domains) and len(table.domains) == 1:
        raise ValueError(
            f"the data has one domain, {table.domains[0]}, and without it nothing is left to train on; use --unseen "
            "none, or add a second domain"
        )
    splits = make_splits(table, rule=config.split, seed=config.seed, holdout=config.holdout)
    labelled = table.label >= 0
    train, validation, test = {}, {}, {}
    for number, name in enumerate(table.domains):
        rows = np.flatnonzero((table.domain == number) & labelled)
        inner, held_out = rows[~splits.part[rows]], rows[splits.part[rows]]
        if not len(inner) or not len(held_out):
            raise ValueError(f"domain {name!r} has {len(rows)} labelled images: too few for its two parts; add some")
        if name == config.unseen:
            test = {"in": inner, "out": held_out}
        else:
            train[number] = inner
            validation[name] = at_most(held_out, config.val_images, [config.seed, number])
    if config.select == "leave-one-out" and len(train) < 2:
        raise ValueError("--select leave-one-out leaves each source domain out in turn, and the data has only one")
    fold = Fold(table, splits, config.unseen, train, validation, test, table.label, table.label, table.classes)
    if entry := fold.benchmark:
        positive = table.classes.index(entry.positive) if entry.positive in table.classes else None
        fold = replace(fold, metric=entry.metric, positive=positive)
    return fold


def leaves_out(config: Config, domains: Sequence[str]) -> bool:
    """Whether one of the domains is unseen; `none` leaves none out, unless a domain has that name."""
    if config.unseen != NO_DOMAIN or NO_DOMAIN in domains:
        check_domain(config.unseen, domains)
        return True
    if config.select == "oracle":
        raise ValueError("--select oracle looks at an unseen domain, and --unseen none leaves none out")
    return False


def check_domain(name: str, domains: Sequence[str]) -> None:
    """Raise ValueError if the data has no domain of this name."""
    if name not in domains:
        hint = did_you_mean(name, domains)
        raise ValueError(f"--unseen {name!r} is not a domain of this data{hint} (domains: {', '.join(domains)})")


def at_most(rows: np.ndarray, limit: int | None, seed: list[int]) -> np.ndarray:
    """At most ``limit`` of the rows, sampled with the seed."""
    if limit is None or len(rows) <= limit:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))

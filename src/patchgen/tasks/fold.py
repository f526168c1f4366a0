"""A fold: the rows of the table for training, selection and scoring."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.data.benchmarks import BENCHMARKS, Benchmark
from patchgen.data.splits import Splits, write_splits
from patchgen.data.table import Table, fingerprint
from patchgen.tasks.metrics import class_counts, scores


@dataclass(frozen=True)
class Fold:
    """One leave-one-domain-out fold.

    Training and selection read only ``target``; ``truth`` is for the scorer. For validation rows the two agree.
    """

    table: Table
    splits: Splits
    unseen: str
    train: dict[int, np.ndarray]  # source domain id -> rows
    validation: dict[str, np.ndarray]  # source domain name -> rows
    test: dict[str, np.ndarray]  # "in" and "out" part of the unseen domain -> rows; empty if none is left out
    target: np.ndarray  # (N,) the target output; -1 if hidden from training
    truth: np.ndarray  # (N,) the true class, known classes first
    classes: tuple[str, ...]  # names of the classifier's outputs

    def fingerprint(self) -> str:
        """Digest of the data that names the run."""
        return fingerprint(self.table)

    def write_rows(self, folder: Path) -> None:
        """Which image is trained on, validated on and scored: `splits.csv`."""
        write_splits(folder / "splits.csv", self.table, self.splits)

    def balanced_weights(self) -> np.ndarray:
        """(C,) class weights: every labelled class gets the same share of the loss in domain-balanced batches.

        The expected weight of an image is 1. Classes without labels have weight 1.
        """
        labels = [self.target[rows] for rows in self.train.values()]
        shares = [np.bincount(own[own >= 0], minlength=len(self.classes)) / max((own >= 0).sum(), 1) for own in labels]
        share = np.mean([one for one in shares if one.any()], axis=0)  # (C,)
        return np.divide(1, share * (share > 0).sum(), out=np.ones_like(share), where=share > 0).astype(np.float32)

    def sample_weights(self) -> np.ndarray | None:
        """(N,) weights of the images in the main loss, with mean 1 over domain-balanced batches.

        None if the data names none, or the training images have equal ones.
        """
        if self.table.weight is None:
            return None
        weight = self.table.weight
        labelled = [weight[rows[self.target[rows] >= 0]] for rows in self.train.values()]
        if len(np.unique(np.concatenate(labelled))) == 1:
            return None
        mean = np.mean([own.mean() for own in labelled if len(own)])
        return (weight / mean).astype(np.float32)

    @property
    def benchmark(self) -> Benchmark | None:
        return BENCHMARKS.get(self.table.benchmark or "")

    @property
    def metric(self) -> str:
        """The metric for selecting checkpoints."""
        return self.benchmark.metric if self.benchmark else "accuracy"

    @property
    def positive(self) -> int | None:
        """The class of the benchmark's F1; None: F1 is the mean over classes."""
        name = self.benchmark.positive if self.benchmark else None
        return self.table.classes.index(name) if name in self.table.classes else None

    @property
    def uncovered(self) -> list[str]:
        """Classes of the unseen domain that no source has: they cannot be learned, and are reported separately."""
        counts = self.table.counts()
        sources = {c for domain, row in counts.items() if domain != self.unseen for c, n in row.items() if n}
        return [c for c, n in counts[self.unseen].items() if n and c not in sources] if self.test else []

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on this fold for the summary."""
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

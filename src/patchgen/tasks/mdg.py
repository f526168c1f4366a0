"""Multi-domain generalisation: train on all domains but one, choose by the sources' held-out parts, score the unseen.

Training sees the "in" part of the source domains, validation their "out" part. The unseen domain is scored whole and,
because the field reports it so, on its "in" part (80 %).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from patchgen.config import Config
from patchgen.data.benchmarks import BENCHMARKS, Benchmark, uncovered_classes
from patchgen.data.splits import Splits, make_splits
from patchgen.data.table import Table, read_table
from patchgen.names import did_you_mean


@dataclass(frozen=True)
class Fold:
    """One leave-one-domain-out fold, as rows of the table."""

    table: Table
    splits: Splits
    unseen: str
    train: dict[int, np.ndarray]  # source domain id -> rows
    validation: dict[str, np.ndarray]  # source domain name -> rows
    test: dict[str, np.ndarray]  # "in" and "out" part of the unseen domain -> rows

    @property
    def benchmark(self) -> Benchmark | None:
        return BENCHMARKS.get(self.table.benchmark or "")

    @property
    def metric(self) -> str:
        return self.benchmark.metric if self.benchmark else "accuracy"

    @property
    def uncovered(self) -> list[str]:
        """Classes of the unseen domain that no source has: they cannot be learned and are reported separately."""
        return uncovered_classes(self.table, self.unseen)


def make_fold(config: Config, table: Table | None = None) -> Fold:
    """Read, check and split the data of a run."""
    table = table or read_table(config.data, benchmark=config.benchmark, options=config.options)
    check_domain(table, config.unseen)
    splits = make_splits(table, rule=config.split, seed=config.seed, holdout=config.holdout)
    labelled = table.label >= 0
    train, validation = {}, {}
    for number, name in enumerate(table.domains):
        rows = np.flatnonzero((table.domain == number) & labelled)
        held_out = rows[splits.part[rows]]
        if name != config.unseen:
            train[number] = rows[~splits.part[rows]]
            validation[name] = _at_most(held_out, config.val_images, [config.seed, number])
            if not len(train[number]) or not len(held_out):
                raise ValueError(
                    f"domain {name!r} has {len(rows)} labelled images: too few for a training and a validation part"
                )
    rows = np.flatnonzero((table.domain == table.domains.index(config.unseen)) & labelled)
    test = {"in": rows[~splits.part[rows]], "out": rows[splits.part[rows]]}
    if not len(test["in"]) or not len(test["out"]):
        raise ValueError(
            f"the unseen domain {config.unseen!r} has {len(rows)} labelled images: too few to be scored in both parts"
        )
    return Fold(table, splits, config.unseen, train, validation, test)


def check_domain(table: Table, name: str) -> None:
    if name in table.domains:
        return
    hint = did_you_mean(name, table.domains)
    raise ValueError(f"--unseen {name!r} is not a domain of this data{hint} (domains: {', '.join(table.domains)})")


def fingerprint(table: Table) -> str:
    """Digest of the rows and their files' sizes: the same data at another path or machine is the same data.

    The sizes tell data sets apart that number their files alike.
    """
    digest = hashlib.sha256()
    for part in (table.paths, table.domains, table.classes, table.group or (), (table.benchmark or "",)):
        digest.update("\n".join(part).encode() + b"\0")
    sizes = np.array([table.file(row).stat().st_size for row in range(len(table))])
    for ids in (table.domain, table.label, sizes):
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def _at_most(rows: np.ndarray, limit: int | None, seed: list[int]) -> np.ndarray:
    if limit is None or len(rows) <= limit:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))

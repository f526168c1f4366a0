"""Multi-domain generalisation: train on all domains but one, select on held-out source images, score the unseen one.

Training uses the "in" part of the source domains, validation their "out" part. The unseen domain is scored as a whole
and, as usual in the literature, on its "in" part (80 %). Without an unseen domain (`none`) nothing is scored.
"""

from collections.abc import Sequence

import numpy as np

from patchgen.common.text import did_you_mean
from patchgen.config import NO_DOMAIN, Config
from patchgen.data.splits import Splits, make_splits
from patchgen.data.table import Table, check_shared, read_table
from patchgen.tasks.fold import Fold


def make_fold(config: Config, table: Table | None = None) -> Fold:
    """Read, check and split the data of a run."""
    table = table or read_table(config.data, benchmark=config.benchmark, options=config.options)
    check_shared(table)
    scores = leaves_out(config, table.domains)
    if scores and len(table.domains) == 1:
        raise ValueError(
            f"the data has one domain, {table.domains[0]}, and without it nothing is left to train on; use --unseen "
            "none, or add a second domain"
        )
    splits = make_splits(table, rule=config.split, seed=config.seed, holdout=config.holdout)
    labelled = table.label >= 0
    train, validation = {}, {}
    for number, name in enumerate(table.domains):
        rows = np.flatnonzero((table.domain == number) & labelled)
        held_out = rows[splits.part[rows]]
        if name != config.unseen:
            train[number] = rows[~splits.part[rows]]
            validation[name] = at_most(held_out, config.val_images, [config.seed, number])
            if not len(train[number]) or not len(held_out):
                raise ValueError(
                    f"domain {name!r} has {len(rows)} labelled images: too few for a training and a validation part"
                )
    if config.select == "leave-one-out" and len(train) < 2:
        raise ValueError("--select leave-one-out leaves each source domain out in turn, and the data has only one")
    test = _test_rows(table, splits, config.unseen) if scores else {}
    return Fold(table, splits, config.unseen, train, validation, test, table.label, table.label, table.classes)


def _test_rows(table: Table, splits: Splits, unseen: str) -> dict[str, np.ndarray]:
    rows = np.flatnonzero((table.domain == table.domains.index(unseen)) & (table.label >= 0))
    test = {"in": rows[~splits.part[rows]], "out": rows[splits.part[rows]]}
    if not len(test["in"]) or not len(test["out"]):
        raise ValueError(
            f"the unseen domain {unseen!r} has {len(rows)} labelled images: too few to be scored in both parts"
        )
    return test


def leaves_out(config: Config, domains: Sequence[str]) -> bool:
    """Whether one of the domains is unseen; `none` leaves none out, unless a domain has that name.

    Raises:
        ValueError: there is no such domain, or the checkpoint should be selected on a domain that is not left out.
    """
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

"""Which images of a domain are held out: DomainBed's rule, bit for bit, or one that keeps patients on one side."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patchgen.common.files import read_csv, write_csv
from patchgen.common.text import did_you_mean
from patchgen.data.table import Table

GROUP_ATTEMPTS = 32
COLUMNS = ("path", "domain", "label", "group", "part", "rule", "seed", "holdout")


@dataclass(frozen=True, eq=False)
class Splits:
    """`part` (N,) bool over the rows of a table: True = "out" (held out for validation), False = "in"."""

    rule: str
    seed: int
    holdout: float
    part: np.ndarray


def domainbed_seed(*parts: int) -> int:
    """DomainBed's seed: md5 of the tuple's text, modulo 2^31."""
    text = str(tuple(map(int, parts)))
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16) % 2**31


def domainbed_split(n: int, trial_seed: int, env: int, holdout: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Index arrays (out, in) of a domain with n images, in DomainBed's shuffled order; out has int(n * holdout)."""
    order = list(range(n))
    # the legacy generator, whose stream numpy guarantees: the same indices on every machine and version
    np.random.RandomState(domainbed_seed(trial_seed, env)).shuffle(order)
    cut = int(n * holdout)
    return np.array(order[:cut], dtype=np.int64), np.array(order[cut:], dtype=np.int64)


def _by_domainbed(table: Table, seed: int, holdout: float, env: int) -> np.ndarray:
    rows = table.rows_of(table.domains[env])
    out, rest = domainbed_split(len(rows), seed, env, holdout)
    return rows[out if len(out) else rest[:1]]  # DomainBed would hold out none where n * holdout < 1


def _by_group(table: Table, seed: int, holdout: float, env: int) -> np.ndarray:
    """Held-out rows of one domain such that no group is on both sides: the best of several seeded orders."""
    if table.group is None:
        raise ValueError("The split rule 'group' needs groups: give the manifest a column 'group' (patient or slide).")
    rows = table.rows_of(table.domains[env])
    names, member = np.unique([table.group[i] for i in rows], return_inverse=True)
    if len(names) < 2:
        fix = "Add another patient, or use the rule 'domainbed'."
        raise ValueError(f"The domain '{table.domains[env]}' has a single group, '{names[0]}'. {fix}")
    images = np.zeros((len(names), len(table.classes) + 1), dtype=np.int64)  # (groups, classes), unlabelled last
    np.add.at(images, (member, table.label[rows]), 1)
    labelled, total = images[:, :-1], len(rows)

    def cost(held: np.ndarray) -> tuple[int, float]:
        """(classes of two or more groups that appear on one side only, distance from the requested share)."""
        one_sided = (labelled[held].sum(axis=0) == 0) | (labelled[~held].sum(axis=0) == 0)
        divisible = (labelled > 0).sum(axis=0) >= 2
        return int((divisible & one_sided).sum()), abs(float(images[held].sum()) / total - holdout)

    seeds = (domainbed_seed(seed, env, attempt) for attempt in range(GROUP_ATTEMPTS))
    best = min((_draw_groups(images.sum(axis=1), holdout, seed) for seed in seeds), key=cost)  # ties: the first
    return rows[best[member]]


def _draw_groups(sizes: np.ndarray, holdout: float, seed: int) -> np.ndarray:
    """Go through the groups in a seeded order; hold out each that brings the share closer to `holdout`: (G,) bool."""
    total, target, count = int(sizes.sum()), holdout * sizes.sum(), 0
    held = np.zeros(len(sizes), dtype=bool)
    for g in np.random.RandomState(seed).permutation(len(sizes)):
        if abs(count + sizes[g] - target) < abs(count - target) and count + sizes[g] < total:
            held[g] = True
            count += int(sizes[g])
    if not held.any():
        held[np.argmin(sizes)] = True
    return held


SplitRule = Callable[[Table, int, float, int], np.ndarray]  # (table, seed, holdout, env) -> held-out rows of env
SPLIT_RULES: dict[str, SplitRule] = {"domainbed": _by_domainbed, "group": _by_group}


def make_splits(table: Table, *, rule: str = "domainbed", seed: int = 1, holdout: float = 0.2) -> Splits:
    """Hold out a share of every domain by a rule of `SPLIT_RULES`; the domain's index in the table is its env."""
    if rule not in SPLIT_RULES:
        hint = did_you_mean(rule, SPLIT_RULES)
        raise ValueError(f"Unknown split rule '{rule}'{hint} (known: {', '.join(SPLIT_RULES)})")
    if not 0 < holdout < 1:
        raise ValueError(f"holdout is the share of images kept for validation, between 0 and 1; got {holdout}.")
    part = np.zeros(len(table), dtype=bool)
    for env, domain in enumerate(table.domains):
        if len(table.rows_of(domain)) < 2:
            raise ValueError(f"The domain '{domain}' has fewer than 2 images: add some, or remove it.")
        part[SPLIT_RULES[rule](table, seed, holdout, env)] = True
    return Splits(rule=rule, seed=seed, holdout=holdout, part=part)


def _described(table: Table, i: int) -> tuple[str, str, str, str]:
    return table.paths[i], table.domains[table.domain[i]], table.label_name(i), table.group[i] if table.group else ""


def write_splits(path: str | Path, table: Table, splits: Splits) -> None:
    """Write one CSV line per row of the table: its description, its part (in or out) and the rule."""
    rule = (splits.rule, str(splits.seed), str(splits.holdout))
    rows = ((*_described(table, i), "out" if splits.part[i] else "in", *rule) for i in range(len(table)))
    write_csv(path, COLUMNS, rows)


def read_splits(path: str | Path, table: Table) -> Splits:
    """Read splits back; ValueError if the file was written for other data."""
    header, lines = read_csv(Path(path))
    if tuple(header) != COLUMNS:
        raise ValueError(f"'{path}' is no splits file: its columns are {', '.join(header)}, not {', '.join(COLUMNS)}.")
    if len(lines) != len(table):
        raise ValueError(f"'{path}' splits {len(lines)} images and the data has {len(table)}: not the same data.")
    for i, (line, cells) in enumerate(lines):
        row, wanted = tuple(cells[c] for c in COLUMNS[:4]), _described(table, i)
        if row != wanted:
            raise ValueError(f"'{path}', line {line}: for {row}, but the data has {wanted} there: not the same data.")
        if cells["part"] not in ("in", "out"):
            raise ValueError(f"'{path}', line {line}: part is 'in' or 'out', not '{cells['part']}'.")
    part = np.array([cells["part"] == "out" for _, cells in lines], dtype=bool)
    rule, seed, holdout = (lines[0][1][c] for c in COLUMNS[5:])
    try:
        return Splits(rule=rule, seed=int(seed), holdout=float(holdout), part=part)
    except ValueError as error:
        raise ValueError(f"'{path}': seed and holdout must be numbers, got '{seed}' and '{holdout}'.") from error

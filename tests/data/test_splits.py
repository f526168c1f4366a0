"""Splits against DomainBed's published indices, and the promises of the group rule."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.data.splits import SPLIT_RULES, domainbed_seed, domainbed_split, make_splits, read_splits, write_splits
from patchgen.data.table import Table

GOLDEN = {
    0: (894182419, 1514274641, 1325548499, 1796103049, 1773288162, 1833038383),
    1: (785910682, 1442673865, 1981683110, 1739848239, 582996474, 65219121),
    2: (472130416, 181139023, 248334461, 1709828778, 402558190, 941488192),
}
PACS = (2048, 2344, 1670, 3929)


def table_of(sizes: tuple[int, ...], group: tuple[str, ...] | None = None, label: np.ndarray | None = None) -> Table:
    domain = np.repeat(np.arange(len(sizes)), sizes)
    n = len(domain)
    paths, domains = tuple(f"{d}/{i}.jpg" for i, d in enumerate(domain)), tuple(f"site{i}" for i in range(len(sizes)))
    label = np.arange(n) % 2 if label is None else label
    return Table(Path("root"), paths, domains, ("cat", "dog"), domain, label, group)


@pytest.mark.parametrize("trial", GOLDEN)
def test_seeds(trial: int) -> None:
    assert tuple(domainbed_seed(trial, env) for env in range(6)) == GOLDEN[trial]
    assert domainbed_seed(np.int64(trial), np.int64(0)) == GOLDEN[trial][0]  # numpy integers print differently


def test_pacs_art_indices() -> None:
    out, rest = domainbed_split(2048, trial_seed=1, env=0)
    assert out[:6].tolist() == [1394, 1699, 1095, 19, 1757, 1988]
    assert (len(out), len(rest)) == (409, 1639)
    assert sorted([*out, *rest]) == list(range(2048))


def test_pacs_sizes_and_rows() -> None:
    table = table_of(PACS)
    splits = make_splits(table)
    assert (splits.rule, splits.seed, splits.holdout) == ("domainbed", 1, 0.2)
    held = [np.flatnonzero(splits.part[table.rows_of(d)]) for d in table.domains]
    assert [len(h) for h in held] == [409, 468, 334, 785]
    for env, n in enumerate(PACS):
        assert held[env].tolist() == sorted(domainbed_split(n, 1, env)[0].tolist())


@given(st.integers(2, 60), st.integers(0, 5), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_domainbed_rule_leaves_both_parts(n: int, seed: int, holdout: float) -> None:
    part = make_splits(table_of((n, n)), seed=seed, holdout=holdout).part
    for half in (part[:n], part[n:]):
        assert half.sum() == max(1, int(n * holdout)) and not half.all()


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(0, 3), st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_groups_stay_together(sizes: list[int], seed: int, holdout: float) -> None:
    group = tuple(f"p{g}" for g, n in enumerate(sizes) for _ in range(n))
    # both sites use the same patient names: a group is one inside a domain only
    table = table_of((len(group), len(group)), group * 2)
    splits = make_splits(table, rule="group", seed=seed, holdout=holdout)
    for domain in table.domains:
        rows = table.rows_of(domain)
        sides = {g: {bool(splits.part[i]) for i in rows if table.group[i] == g} for g in set(group)}
        assert all(len(side) == 1 for side in sides.values())
        assert {True, False} == set.union(*sides.values())
        # never further from the wanted share than the largest group
        assert abs(splits.part[rows].sum() - holdout * len(rows)) <= max(sizes)


def test_group_rule_keeps_classes_on_both_sides() -> None:
    # 40 patients of 5 images; only two of them have dogs, so most random draws would lose the dogs on one side
    group = tuple(f"p{i // 5:02d}" for i in range(200))
    label = np.array([int(g in ("p03", "p31")) for g in group])
    table = table_of((200, 200), group * 2, np.concatenate([label, label]))
    for seed in range(5):
        part = make_splits(table, rule="group", seed=seed).part
        for domain in table.domains:
            rows = table.rows_of(domain)
            dogs = part[rows][table.label[rows] == 1]
            assert dogs.any() and not dogs.all()
            assert part[rows].mean() == 0.2


def test_group_rule_depends_on_the_seed_not_on_row_order() -> None:
    group, order = tuple(f"p{i % 20}" for i in range(100)) * 2, np.random.RandomState(0).permutation(200)
    table = table_of((100, 100), group)
    paths, groups = (tuple(column[i] for i in order) for column in (table.paths, group))
    mixed = replace(table, paths=paths, domain=table.domain[order], label=table.label[order], group=groups)

    def held(t: Table, seed: int) -> set[str]:
        part = make_splits(t, rule="group", seed=seed).part
        return {p for p, out in zip(t.paths, part, strict=True) if out}

    assert held(table, 1) == held(mixed, 1) != held(table, 2)


def test_errors() -> None:
    with pytest.raises(ValueError, match="Unknown split rule 'groups'.*did you mean 'group'"):
        make_splits(table_of((5, 5)), rule="groups")
    for holdout in (0, 1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            make_splits(table_of((5, 5)), holdout=holdout)
    with pytest.raises(ValueError, match="'site1' has fewer than 2 images"):
        make_splits(table_of((5, 1)))
    with pytest.raises(ValueError, match="needs groups"):
        make_splits(table_of((5, 5)), rule="group")
    with pytest.raises(ValueError, match="'site1' has a single group, 'q'"):
        make_splits(table_of((2, 3), ("p", "q", "q", "q", "q")), rule="group")


@pytest.mark.parametrize("rule", SPLIT_RULES)
def test_round_trip(tmp_path: Path, rule: str) -> None:
    table = table_of((20, 30), tuple(f" p{i % 7}" for i in range(50)))
    splits = make_splits(table, rule=rule, seed=3, holdout=0.25)
    write_splits(tmp_path / "splits.csv", table, splits)
    back = read_splits(tmp_path / "splits.csv", table)
    assert (back.rule, back.seed, back.holdout) == (rule, 3, 0.25)
    assert back.part.dtype == bool and back.part.tolist() == splits.part.tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["splits.csv"]
    first = (tmp_path / "splits.csv").read_text().splitlines()[:2]
    assert first[0] == "path,domain,label,group,part,rule,seed,holdout"
    assert first[1].startswith("0/0.jpg,site0,cat, p0,") and first[1].endswith(f",{rule},3,0.25")


def test_read_splits_refuses_other_data(tmp_path: Path) -> None:
    path, table = tmp_path / "splits.csv", table_of((5, 5))
    write_splits(path, table, make_splits(table))
    with pytest.raises(ValueError, match="splits 10 images and the data has 11"):
        read_splits(path, table_of((5, 6)))
    with pytest.raises(ValueError, match="line 2: .*'cat'.*'dog'.*not the same data"):
        read_splits(path, table_of((5, 5), label=np.ones(10, dtype=np.int64)))
    path.write_text(path.read_text().replace(",out,", ",test,"))
    with pytest.raises(ValueError, match="part is 'in' or 'out', not 'test'"):
        read_splits(path, table)
    path.write_text("path,domain\n")
    with pytest.raises(ValueError, match="is no splits file"):
        read_splits(path, table)
    with pytest.raises(FileNotFoundError):
        read_splits(tmp_path / "none.csv", table)

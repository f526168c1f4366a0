"""A fold: the unseen domain is in no training or validation row, and mistakes are named before any work."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.config import Config
from patchgen.data.table import Table, fingerprint
from patchgen.tasks.mdg import check_domain, make_fold


def make_table(per_domain: int = 40, domains: tuple[str, ...] = ("art", "photo", "sketch"), **changes: Any) -> Table:
    n = per_domain * len(domains)
    settings: dict[str, Any] = {
        "root": Path("photos"), "paths": tuple(f"{i:03d}.png" for i in range(n)), "domains": domains,
        "classes": ("cat", "dog"), "domain": np.repeat(np.arange(len(domains)), per_domain), "label": np.arange(n) % 2,
    }  # fmt: skip
    return Table(**{**settings, **changes})


def config(**changes: Any) -> Config:
    return Config(**{"data": "photos", "unseen": "photo", **changes})


@pytest.mark.parametrize("unseen", ["art", "photo", "sketch"])
@pytest.mark.parametrize("holdout", [0.2, 0.5])
def test_a_fold_is_a_partition_without_the_unseen_domain(unseen: str, holdout: float) -> None:
    table = make_table()
    fold = make_fold(config(unseen=unseen, holdout=holdout), table)
    number = table.domains.index(unseen)
    sources = [d for d in table.domains if d != unseen]
    assert [table.domains[d] for d in fold.train] == list(fold.validation) == sources
    for name in sources:
        train, validation = fold.train[table.domains.index(name)], fold.validation[name]
        assert sorted([*train, *validation]) == table.rows_of(name).tolist()  # disjoint, and nothing is lost
        assert len(validation) == int(40 * holdout)
        assert not fold.splits.part[train].any() and fold.splits.part[validation].all()
    seen = np.concatenate([*fold.train.values(), *fold.validation.values()])
    assert number not in table.domain[seen]
    assert sorted([*fold.test["in"], *fold.test["out"]]) == table.rows_of(unseen).tolist()
    assert len(fold.test["out"]) == int(40 * holdout) and fold.unseen == unseen


def test_a_domains_split_does_not_depend_on_the_fold() -> None:
    table = make_table()
    one, other = make_fold(config(unseen="art"), table), make_fold(config(unseen="photo"), table)
    assert one.validation["sketch"].tolist() == other.validation["sketch"].tolist()
    assert one.test["out"].tolist() == other.validation["art"].tolist()


def test_the_validation_cap_is_drawn_by_the_seed_and_takes_nothing_from_training() -> None:
    table = make_table()
    free, capped, again, other = (
        make_fold(config(val_images=cap, seed=seed), table) for cap, seed in ((None, 1), (3, 1), (3, 1), (3, 2))
    )
    for name, rows in capped.validation.items():
        assert len(set(rows)) == 3 and set(rows) <= set(free.validation[name])
        assert rows.tolist() == sorted(rows) == again.validation[name].tolist() != other.validation[name].tolist()
    assert all((rows == free.train[domain]).all() for domain, rows in capped.train.items())
    assert all((rows == free.test[part]).all() for part, rows in capped.test.items())


def test_rows_without_a_label_are_in_no_part() -> None:
    label = np.arange(120) % 2
    label[::3] = -1
    table = make_table(label=label)
    fold = make_fold(config(), table)
    used = np.concatenate([*fold.train.values(), *fold.validation.values(), *fold.test.values()])
    assert sorted(used) == np.flatnonzero(label >= 0).tolist()


@pytest.mark.parametrize(("first", "domain", "number"), [(0, "art", 0), (40, "photo", 0), (41, "photo", 1)])
def test_a_domain_without_enough_labels_is_refused_before_training(first: int, domain: str, number: int) -> None:
    label = np.arange(120) % 2
    label[first : first // 40 * 40 + 40] = -1
    with pytest.raises(ValueError, match=f"domain '{domain}' has {number} labelled images: too few"):
        make_fold(config(), make_table(label=label))


def test_an_unknown_domain_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"--unseen 'skecth' .*; did you mean 'sketch'\? \(domains: art, photo"):
        make_fold(config(unseen="skecth"), make_table())
    with pytest.raises(ValueError, match=r"'zzz' is not a domain of this data \(domains"):
        check_domain("zzz", make_table().domains)


def test_classes_that_no_source_has_are_named() -> None:
    label = np.arange(120) % 2
    label[40:50] = 2  # in photo alone
    label[0:5] = 3  # in art alone
    table = make_table(label=label, classes=("cat", "dog", "owl", "fox", "never"))
    assert make_fold(config(), table).uncovered == ["owl"]
    assert make_fold(config(unseen="art"), table).uncovered == ["fox"]
    assert make_fold(config(unseen="sketch"), table).uncovered == []


def test_scores_without_the_classes_that_no_source_has() -> None:
    label = np.arange(120) % 2
    label[40:50] = 2
    fold = make_fold(config(), make_table(label=label, classes=("cat", "dog", "owl")))
    found = fold.scores(np.array([[6, 2, 0], [1, 9, 0], [10, 0, 0]]))
    assert found["accuracy"] == 15 / 28
    assert found["covered"]["without"] == ["owl"] and found["covered"]["accuracy"] == 15 / 18


def test_metric_is_the_benchmarks() -> None:
    assert make_fold(config(), make_table()).metric == "accuracy"
    fold = make_fold(config(unseen="colon"), make_table(domains=("colon", "ovarian"), benchmark="histopantum"))
    assert fold.metric == "f1" and fold.benchmark is not None and fold.benchmark.name == "histopantum"


def test_fingerprint_is_of_the_rows_and_not_of_the_place(tmp_path: Path) -> None:
    def on_disk(place: str, size: int = 3, **changes: Any) -> Table:
        table = make_table(root=tmp_path / place, **changes)
        for row in range(len(table)):
            table.file(row).parent.mkdir(parents=True, exist_ok=True)
            table.file(row).write_bytes(b"x" * size)
        return table

    table = on_disk("here")
    assert fingerprint(table) == fingerprint(on_disk("elsewhere"))
    label = table.label.copy()
    label[7] = 1 - label[7]
    others = [
        on_disk("a", label=label),
        on_disk("b", domain=table.domain[::-1].copy()),
        on_disk("c", paths=("x.png", *table.paths[1:])),
        on_disk("d", classes=("cat", "cow")),
        on_disk("e", domains=("art", "photo", "drawing")),
        on_disk("f", group=tuple("p" * 120)),
        on_disk("g", size=4),  # other pictures under the same names
        on_disk("h", weight=np.ones(120)),
    ]
    assert len({fingerprint(t) for t in [table, *others]}) == 9


def test_weights_have_mean_one_in_balanced_batches() -> None:
    weight = np.repeat([1.0, 5.0, 3.0], 40)  # art, photo (unseen), sketch
    weights = make_fold(config(), make_table(weight=weight)).sample_weights()
    assert weights is not None and np.unique(weights[:40]) == 0.5 and np.unique(weights[80:]) == 1.5
    assert make_fold(config(), make_table(weight=np.full(120, 0.3))).sample_weights() is None


def test_a_folder_is_read_when_no_table_is_given(image_folder: Path) -> None:
    fold = make_fold(config(data=str(image_folder), unseen="studio"))
    assert {name: len(rows) for name, rows in fold.validation.items()} == {"clinic": 6, "field": 6}
    assert {part: len(rows) for part, rows in fold.test.items()} == {"in": 24, "out": 6}

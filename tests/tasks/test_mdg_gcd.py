"""Unseen domain with unknown classes: which labels are hidden, what is scored, and that nothing hidden leaks."""

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchgen.config import Config
from patchgen.data.table import Table
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors
from patchgen.tasks import make_fold
from patchgen.tasks.mdg_gcd import DiscoveryFold, known_classes, output_names
from patchgen.train.lifecycle import train

CLASSES = ("ant", "bee", "cat", "dog", "eel")
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def table_of(label: np.ndarray | None = None) -> Table:
    """3 domains x 5 classes x 12 images."""
    label = np.tile(np.repeat(np.arange(5), 12), 3) if label is None else label
    paths = tuple(f"{i}.png" for i in range(180))
    return Table(Path("zoo"), paths, ("farm", "park", "wood"), CLASSES, np.repeat(np.arange(3), 60), label)


def fold_of(table: Table | None = None, **changes: Any) -> DiscoveryFold:
    fold = make_fold(Config(data="zoo", unseen="wood", task="mdg_gcd", **changes), table or table_of())
    assert isinstance(fold, DiscoveryFold)
    return fold


# Known and unknown


def test_the_hosts_rule_is_half_and_one_more() -> None:
    assert known_classes("lreg", PACS) == (PACS[:4], PACS[4:])  # facts of the host: 4 and 3 of PACS
    sizes = {65: 33, 10: 6, 345: 173, 5: 3}
    assert {n: len(known_classes("lreg", tuple(map(str, range(n))))[0]) for n in sizes} == sizes
    assert known_classes("half", PACS) == (PACS[:3], PACS[3:])


def test_a_users_list_may_have_any_order() -> None:
    fold = fold_of(known="dog, ant")
    assert fold.known == ("dog", "ant") and fold.unknown == ("bee", "cat", "eel")
    assert fold.classes == ("dog", "ant", "new-1", "new-2", "new-3")
    names = np.array([*fold.known, *fold.unknown])
    assert (names[fold.truth] == np.array(CLASSES)[fold.table.label]).all()


@pytest.mark.parametrize(("changes", "message"), [
    ({"known": "ant"}, "is 1 of 5 classes: name at least two"),
    ({"known": "ant,bea"}, "--known 'bea' is not a class of this data; did you mean 'bee'?"),
    ({"known": ",".join(CLASSES)}, "is 5 of 5 classes: name at least two, and leave some to discover"),
    ({"num_classes": 2}, "--num-classes 2 is less than the 3 known classes"),
])  # fmt: skip
def test_impossible_choices_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        fold_of(**changes)
    assert message in str(caught.value)


def test_sources_without_unknown_or_without_known_classes_are_refused() -> None:
    label = np.tile(np.repeat(np.arange(5), 12), 3)
    label[:120] %= 3  # the sources hold the known classes alone
    with pytest.raises(ValueError, match="the unlabelled pool is empty"):
        fold_of(table_of(label))
    label[:60] = 3 + np.arange(60) % 2
    with pytest.raises(ValueError, match="'farm'"):
        fold_of(table_of(label))


def test_the_number_of_outputs_may_differ_from_the_number_of_classes() -> None:
    assert output_names(("a", "b"), ("c", "d"), 3) == ("a", "b", "new-1")
    assert output_names(("a", "b"), ("c", "d"), None) == ("a", "b", "new-1", "new-2")
    assert fold_of(num_classes=7).size == 7 and fold_of(num_classes=4).size == 5


# Hiding


def test_targets_of_unknown_classes_are_gone_and_validation_has_none() -> None:
    fold = fold_of()
    assert ((fold.target == -1) == (fold.truth >= 3)).all()
    for rows in fold.validation.values():
        assert len(rows) and (fold.truth[rows] < 3).all()
    pool = np.concatenate(list(fold.train.values()))
    assert {-1, 0, 1, 2} == set(fold.target[pool].tolist())


def test_the_mixed_pool_hides_a_share_of_known_images_too() -> None:
    fold = fold_of(unlabelled="mixed", labelled_share=0.25)
    for rows in fold.train.values():
        known = rows[fold.truth[rows] < 3]
        assert (fold.target[known] >= 0).sum() == len(known) - round(0.75 * len(known))
        assert (fold.target[rows[fold.truth[rows] >= 3]] == -1).all()
    again, other = fold_of(unlabelled="mixed"), fold_of(unlabelled="mixed", seed=2)
    assert (again.target == fold_of(unlabelled="mixed").target).all() and (again.target != other.target).any()


def test_patients_on_both_sides_are_noted_here_too() -> None:
    table = replace(table_of(), group=tuple(f"patient {i % 12}" for i in range(180)))
    torn, shared, *own = fold_of(table).notes
    assert torn.startswith("the split puts 12 groups on both sides of their domain (patient 0)")
    assert shared == make_fold(Config(data="zoo", unseen="wood"), table).notes[1]
    assert shared.startswith("12 of 12 groups of wood also occur in the sources") and tuple(own) == fold_of().notes


# Scores


def by_permutation(confusion: np.ndarray, num_known: int) -> tuple[float, float, float]:
    """The best of all one-to-one matches, tried one by one."""
    best = max(
        itertools.permutations(range(len(confusion))), key=lambda p: sum(confusion[i, j] for i, j in enumerate(p))
    )
    hits = np.array([confusion[i, j] for i, j in enumerate(best)])
    total = confusion.sum(1)
    return (
        hits.sum() / total.sum(),
        hits[:num_known].sum() / total[:num_known].sum(),
        hits[num_known:].sum() / total[num_known:].sum(),
    )


def test_scores_are_those_of_the_best_permutation() -> None:
    fold = fold_of()
    for seed in range(20):
        confusion = np.random.default_rng(seed).integers(0, 1000, (5, 5))
        found = fold.scores(confusion)
        wanted = by_permutation(confusion, 3)
        assert (found["accuracy"], found["known"], found["unknown"]) == pytest.approx(wanted)


def test_the_record_names_outputs_and_counts_what_was_taken_for_known() -> None:
    confusion = np.zeros((5, 5), int)
    confusion[0, 0] = confusion[1, 1] = confusion[2, 2] = 10
    confusion[3, 4], confusion[3, 0], confusion[4, 3] = 6, 4, 10
    found = fold_of().scores(confusion)
    assert found["outputs"] == {"ant": "ant", "bee": "bee", "cat": "cat", "new-2": "dog", "new-1": "eel"}
    assert found["taken_for_known"] == pytest.approx(4 / 20)
    assert found["by_name"] == pytest.approx({"all": 46 / 50, "known": 1.0, "unknown": 16 / 20})
    assert found["per_class"]["dog"] == pytest.approx(0.6) and found["unknown"] == pytest.approx(16 / 20)


def test_a_known_output_may_not_stand_for_a_new_class_by_name() -> None:
    confusion = np.zeros((5, 5), int)
    confusion[1, 1] = confusion[2, 2] = 10
    confusion[0, 0], confusion[3, 0] = 4, 30  # most dogs are called ants: the joint match gives them that output
    found = fold_of().scores(confusion)
    assert (found["known"], found["unknown"]) == pytest.approx((20 / 24, 1.0))
    assert found["by_name"] == pytest.approx({"all": 24 / 54, "known": 1.0, "unknown": 0.0})


# Whole runs


@pytest.fixture(scope="module")
def manifests(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The shapes with `square` divided in two unknown classes; `permuted` exchanges labels among those two."""
    folder = tmp_path_factory.mktemp("manifests")
    found = {}
    for name in ("plain", "permuted"):
        rng, rows = np.random.default_rng(5), []
        for file in sorted(image_folder.rglob("*.png")):
            domain, label = file.parts[-3:-1]
            if label == "square":
                label = "square-" + "ab"[(int(file.stem) % 2) if name == "plain" else int(rng.integers(2))]
            rows.append((file, domain, label))
        found[name] = str(folder / f"{name}.csv")
        with open(found[name], "w", newline="") as handle:
            csv.writer(handle).writerows([("path", "domain", "label"), *rows])
    return found


@pytest.fixture(scope="module")
def run_on(manifests: dict[str, str], tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs")

    def make(data: str, **settings: Any) -> RunFolder:
        changes = {"data": manifests[data], "task": "mdg_gcd", "known": "circle,cross", **settings}
        return train(Config(**{**tiny_settings, **changes}), out, quiet=True)

    return make


def tensors_of(run: RunFolder) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for name in ("selected", "swad")
            for key, value in load_tensors(run.checkpoint(name))[0].items()}  # fmt: skip


@pytest.mark.parametrize("method", ["lp-ln", "patchgen", "patchgen+lreg", "pim", "gmdg"])
def test_hidden_labels_change_nothing_bit_for_bit(run_on: Any, method: str) -> None:
    one, other = run_on("plain", method=method), run_on("permuted", method=method)
    assert one.path != other.path
    tensors, others = tensors_of(one), tensors_of(other)
    assert tensors.keys() == others.keys() and all(torch.equal(tensors[k], others[k]) for k in tensors)
    kept = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.records("evaluation")] for run in (one, other)]
    assert json.dumps(kept[0]) == json.dumps(kept[1])


def test_the_upper_bound_does_see_them(run_on: Any) -> None:
    tensors, others = (tensors_of(run_on(data, method="all-labels")) for data in ("plain", "permuted"))
    assert not all(torch.equal(tensors[k], others[k]) for k in tensors)


def test_a_run_reports_all_known_unknown(run_on: Any) -> None:
    run = run_on("plain", method="patchgen")
    record = next(r for r in run.records("test") if r["checkpoint"] == "selected")
    assert record["all"]["images"] == 30 and record["all"]["known_images"] == 20
    for part in ("in", "out", "all"):
        score = record[part]
        share = score["known_images"] / score["images"]
        assert score["accuracy"] == pytest.approx(share * score["known"] + (1 - share) * score["unknown"])
    assert load_tensors(run.checkpoint("selected"))[1]["classes"] == ["circle", "cross", "new-1", "new-2"]
    text = (run.path / "summary.md").read_text()
    assert "- known classes: circle, cross\n" in text and "| new classes |" in text and "UPPER" not in text.upper()
    assert f"{record['all']['taken_for_known']:.1%} of the unknown classes' images were given a known class" in text
    assert "upper bound" in (run_on("plain", method="all-labels").path / "summary.md").read_text()

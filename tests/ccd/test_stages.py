"""Stages against the protocol's published counts, and the promises of the draw."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patchgen.ccd.stages import SCHEDULES, Schedule, get_schedule, make_stages, shuffled

PAPER = SCHEDULES["paper"]
# images of a class in stages 0..3, by the stage at which its group enters
CIFAR_COUNTS = ([435, 35, 15, 15], [0, 350, 100, 50], [0, 0, 450, 50], [0, 0, 0, 500])
CUB_COUNTS = {
    30: ([26, 2, 1, 1], [0, 21, 6, 3], [0, 0, 27, 3], [0, 0, 0, 30]),
    29: ([25, 2, 1, 1], [0, 20, 6, 3], [0, 0, 26, 3], [0, 0, 0, 29]),
}
PINNED = {
    ("apple", 1): [6, 1, 2, 0, 5, 4, 3, 7],
    ("apple", 2): [2, 5, 4, 6, 3, 1, 0, 7],
    ("bear", 1): [7, 3, 5, 1, 0, 2, 6, 4],
}  # figures of this code's first version: others would give everyone other stages
YAML = """
groups: [0.5, 0.25, 0.25]
ratios:
  - [0.8, 0.5, 1.0]
  - [0.7, 1]
  - [1.0]
seed: 3
"""


def names_of(classes: int) -> tuple[str, ...]:
    return tuple(f"class{c:03d}" for c in range(classes))


def test_cifar_counts_and_totals() -> None:
    label = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 500))
    stages = make_stages(label, names_of(100), PAPER)
    entry = np.repeat([0, 1, 2, 3], [70, 10, 10, 10])
    assert stages.entry.tolist() == entry.tolist()
    assert stages.counts.tolist() == [CIFAR_COUNTS[e] for e in entry]
    assert [len(stages.rows(s)) for s in range(4)] == [30450, 5950, 6550, 7050]
    assert [len(stages.entered(s)) for s in range(4)] == [70, 80, 90, 100]
    known = [int(np.isin(label[stages.rows(s)], np.arange(70)).sum()) for s in range(4)]
    assert known == [30450, 2450, 1050, 1050]
    everything = np.concatenate([stages.rows(s) for s in range(4)])
    assert sorted(everything) == list(range(50_000))  # disjoint, and nothing is lost
    assert len(stages) == 4


def test_cub_counts_and_totals() -> None:
    small = {3, 50, 139, 150, 170, 199}  # 5,994 = 200 x 30 - 6
    images = [29 if c in small else 30 for c in range(200)]
    stages = make_stages(np.repeat(np.arange(200), images), names_of(200), PAPER)
    entry = np.repeat([0, 1, 2, 3], [140, 20, 20, 20])
    assert stages.entry.tolist() == entry.tolist()
    assert stages.counts.tolist() == [CUB_COUNTS[n][e] for n, e in zip(images, entry, strict=True)]
    # 3640/700/800/860, less one image for each small class where its group enters
    assert stages.counts.sum(axis=0).tolist() == [3637, 699, 799, 859]
    full = make_stages(np.repeat(np.arange(200), 30), names_of(200), PAPER)
    assert full.counts.sum(axis=0).tolist() == [3640, 700, 800, 860]


def test_the_draw_is_pinned() -> None:
    assert {key: shuffled(np.arange(8), *key).tolist() for key in PINNED} == PINNED
    assert shuffled(np.arange(8), "caf\u00e9", 1).tolist() == shuffled(np.arange(8), "cafe\u0301", 1).tolist()


def test_the_same_stages_on_repeat_and_with_classes_in_another_order() -> None:
    names = names_of(12)
    label = np.repeat(np.arange(12), 20)
    groups = (names[:6], names[6:9], names[9:])
    schedule = Schedule(groups, ((0.8, 0.5, 1.0), (0.7, 1.0), (1.0,)))
    one, again = (make_stages(label, names, schedule) for _ in range(2))
    assert one.stage.tolist() == again.stage.tolist()
    assert one.stage.tolist() != make_stages(label, names, replace(schedule, seed=2)).stage.tolist()

    order = np.random.default_rng(0).permutation(12)  # new id -> old id
    other = make_stages(np.argsort(order)[label], [names[c] for c in order], schedule)
    assert other.stage.tolist() == one.stage.tolist()
    assert other.entry.tolist() == one.entry[order].tolist()

    mixed = np.argsort(np.arange(240) % 20, kind="stable")  # rows of the classes interleaved, each in its own order
    assert make_stages(label[mixed], names, schedule).stage.tolist() == one.stage[mixed].tolist()


def test_tiny_classes_appear_in_their_first_stage() -> None:
    label = np.repeat(np.arange(5), [1, 2, 30, 1, 30])
    names = ("one", "two", "many", "late", "last")
    schedule = Schedule((("one", "two", "many"), ("late",), ("last",)), ((0.87, 0.54, 1.0), (0.7, 1.0), (1.0,)))
    assert make_stages(label, names, schedule).entry.tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(("classes", "sizes"), [
    (100, [70, 10, 10, 10]), (200, [140, 20, 20, 20]), (101, [71, 10, 10, 10]), (10, [7, 1, 1, 1]), (7, [4, 1, 1, 1]),
    (4, [1, 1, 1, 1]),
])  # fmt: skip
def test_shares_of_the_classes(classes: int, sizes: list[int]) -> None:
    group = PAPER.group_of(names_of(classes))
    assert np.bincount(group).tolist() == sizes and group.tolist() == sorted(group)


def test_shares_and_a_last_ratio_below_one_leave_classes_and_images_out() -> None:
    entry = [0] * 5 + [1] * 2 + [-1] * 3
    stages = make_stages(np.repeat(np.arange(10), 4), names_of(10), Schedule((0.5, 0.2), ((0.5, 1.0), (1.0,))))
    assert stages.entry.tolist() == entry and (stages.stage[28:] == -1).all()
    stages = make_stages(np.repeat([0, 1], 10), ("a", "b"), Schedule((0.5, 0.5), ((0.5, 0.4), (0.5,))))
    assert stages.counts.tolist() == [[5, 2], [0, 5]] and (stages.stage == -1).sum() == 8


def test_wrong_data_for_a_schedule() -> None:
    with pytest.raises(ValueError, match="4 class groups need at least as many classes, the data has 3"):
        make_stages(np.arange(3), names_of(3), PAPER)
    with pytest.raises(ValueError, match="no class of group 2 \\(class008\\) has an image"):
        make_stages(np.repeat(np.arange(8), 5), names_of(10), PAPER)
    named = Schedule((("cat", "dgo"), ("cow",)), ((0.5, 1.0), (1.0,)))
    with pytest.raises(ValueError, match="group 0 names the class 'dgo', which the data does not have; .*'dog'"):
        make_stages(np.arange(3), ("cat", "cow", "dog"), named)
    with pytest.raises(ValueError, match="seed must be a whole number from 0"):
        replace(PAPER, seed=-1)


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(YAML)
    expected = Schedule((0.5, 0.25, 0.25), ((0.8, 0.5, 1.0), (0.7, 1.0), (1.0,)), seed=3)
    assert get_schedule(path) == expected
    path.write_text("groups: [[cat, dog], [cow]]\nratios: [[0.5, 1], [1]]\n")
    assert get_schedule(path) == Schedule((("cat", "dog"), ("cow",)), ((0.5, 1.0), (1.0,)), seed=1)
    assert get_schedule("paper") is PAPER
    with pytest.raises(ValueError, match="no schedule is called 'papre'; did you mean 'paper'"):
        get_schedule("papre")
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        get_schedule(tmp_path / "none.yaml")


YAML_ERRORS = {
    "unknown key": (("ratios:", "ratio:"), "must hold the keys groups and ratios, .*'ratio'"),
    "missing key": (("groups: [0.5, 0.25, 0.25]", ""), "must hold the keys groups and ratios"),
    "too few rows": (("  - [1.0]\n", ""), "a row for each of the 3 class groups"),
    "short row": (("[0.7, 1]", "[1]"), "one for each later stage, not .*\\[1\\]"),
    "ratio above 1": (("[0.7, 1]", "[1.7, 1]"), "ratios must be .*from 0 to 1, not .*1.7"),
    "first ratio 0": (("[0.7, 1]", "[0, 1]"), "one number above 0 for the stage.*\\[0, 1\\]"),
    "shares above 1": (("0.25]", "0.5]"), "at most 1 together, .*not \\[0.5, 0.25, 0.5\\]"),
    "share 0": (("0.25]", "0]"), "above 0.*, 0\\]"),
    "class twice": (("[0.5, 0.25, 0.25]", "[[a, b], [c], [a]]"), "each in one group, not .*\\['a'\\]"),
    "empty group": (("[0.5, 0.25, 0.25]", "[[a, b], [], [c]]"), "two or more groups.* not .*\\[\\]"),
    "class is a number": (("[0.5, 0.25, 0.25]", "[[a], [7], [c]]"), "groups must be .*7.*; put class names in quotes"),
    "one group": (("[0.5, 0.25, 0.25]", "[1]"), "two or more groups"),
    "not YAML": (("[0.7, 1]", "[0.7, 1"), "not readable YAML"),
    "no keys": ((YAML, "7"), "must hold the keys groups and ratios, .*not 7"),
}


@pytest.mark.parametrize("case", YAML_ERRORS)
def test_yaml_errors(tmp_path: Path, case: str) -> None:
    change, message = YAML_ERRORS[case]
    path = tmp_path / "stages.yaml"
    path.write_text(YAML.replace(*change))
    with pytest.raises(ValueError, match=message) as caught:
        get_schedule(path)
    assert "stages.yaml" in str(caught.value)

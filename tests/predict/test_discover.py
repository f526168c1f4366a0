"""Groups of what fits no known class: planted features come out exactly, the reference is the run's own."""

import csv
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from patchgen.data.images import decode
from patchgen.predict.discover import Features, Rule, calibrated_rule, group_features, read_features, reference_images
from patchgen.predict.predictor import Prediction, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import Predictions, predictions_file, save_predictions

MakeRun = Callable[..., RunFolder]
NAMES = ("ant", "bee", "cat")  # of the first three axes


def blobs(counts: dict[int, int], seed: int = 0, spread: float = 0.02, dim: int = 12) -> tuple[np.ndarray, list[int]]:
    """Unit vectors around the axes of the space, as many for each axis as asked, and their axes."""
    axis = np.repeat(list(counts), list(counts.values()))
    points = np.eye(dim)[axis] + spread * np.random.default_rng(seed).standard_normal((len(axis), dim))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32), axis.tolist()


def features_of(vectors: np.ndarray, labels: Sequence[str] = (), sure: Sequence[float] = ()) -> Features:
    answers = zip(vectors, labels or ["ant"] * len(vectors), sure or [0.4] * len(vectors), strict=True)
    return Features(
        [Prediction(Path(f"{i}.png"), label, p, np.array([p]), None, None, vector)
         for i, (vector, label, p) in enumerate(answers)], vectors, [],
    )  # fmt: skip


def known_blobs(spread: float = 0.02) -> tuple[np.ndarray, list[str]]:
    vectors, axis = blobs({0: 20, 1: 20, 2: 20}, seed=1, spread=spread)
    return vectors, [NAMES[a] for a in axis]


# Grouping


def test_separated_blobs_come_out_exactly() -> None:
    vectors, axis = blobs({4: 5, 0: 7, 5: 11, 2: 3})
    groups = group_features(features_of(vectors), *known_blobs(), new_classes=2)
    name = {0: "ant", 2: "cat", 5: "new-1", 4: "new-2"}  # the larger new group is the first
    assert [one.group for one in groups.members] == [name[a] for a in axis]
    assert [one.fits_known for one in groups.members] == [a < 3 for a in axis]
    assert groups.new == ["new-1", "new-2"] and groups.known == ["ant", "bee", "cat"] and groups.estimate is None
    assert [one.path.name for one in groups.members] == [f"{i}.png" for i in range(len(axis))]


def test_known_classes_are_pinned() -> None:
    """Two known classes that lie together stay two, and the new cluster is spent on what is new."""
    known, _ = blobs({0: 20, 1: 10}, seed=1)
    vectors, axis = blobs({0: 10, 5: 3})
    groups = group_features(features_of(vectors), known, ["left"] * 10 + ["right"] * 10 + ["far"] * 10, new_classes=1)
    assert {one.group for one, a in zip(groups.members, axis, strict=True) if a == 0} <= {"left", "right"}
    assert [one.group for one, a in zip(groups.members, axis, strict=True) if a == 5] == ["new-1"] * 3


def test_numbers_equal_the_obvious_computation() -> None:
    vectors, _ = blobs({4: 8, 0: 8, 5: 12}, spread=0.2)
    known, labels = known_blobs(0.2)
    groups = group_features(features_of(vectors), known, labels, new_classes=2)
    centre = {}
    for name in ("ant", "bee", "cat", "new-1", "new-2"):
        mine = [v for v, one in zip(vectors, groups.members, strict=True) if one.group == name]
        centre[name] = np.mean(mine + [v for v, label in zip(known, labels, strict=True) if label == name], axis=0)
    for vector, one in zip(vectors, groups.members, strict=True):
        distance = {name: float(np.linalg.norm(vector - c)) for name, c in centre.items()}
        first, second, *_ = sorted(distance.values())
        nearest = min(("ant", "bee", "cat"), key=distance.__getitem__)
        assert one.group == min(distance, key=distance.__getitem__) and one.nearest_known == nearest
        assert one.distance == pytest.approx(first, abs=2e-3)
        assert one.confidence == pytest.approx(1 - first / second, abs=4e-3)
        assert one.distance_ratio == pytest.approx(first / distance[nearest], abs=4e-3)
        assert (one.distance_ratio == 1) == one.fits_known


def test_equal_points_are_no_division_by_zero() -> None:
    same = np.tile(np.eye(12, dtype=np.float32)[0], (4, 1))
    groups = group_features(features_of(same), same[:2], ["a", "a"], new_classes=1)
    assert all(one.confidence == 0 and one.distance_ratio == 1 and one.fits_known for one in groups.members)
    assert groups.new == []


def test_a_known_class_may_be_called_like_a_group() -> None:
    known, axis = blobs({0: 5, 1: 5})
    vectors, _ = blobs({4: 3, 5: 2})
    groups = group_features(features_of(vectors), known, [f"new-{a + 1}" for a in axis], new_classes=2)
    assert groups.new == ["new-3", "new-4"] and Counter(m.group for m in groups.members) == {"new-3": 3, "new-4": 2}


# The number of new classes


def test_the_estimate_finds_that_something_is_new() -> None:
    """Overlapping classes and many more examples than images: the examples must not drown the images."""
    known, axis = blobs({0: 60, 1: 60, 2: 60}, seed=1, spread=0.25)
    labels = [NAMES[a] for a in axis]
    vectors, _ = blobs({4: 12, 5: 12}, spread=0.05)
    groups = group_features(features_of(vectors), known, labels, at_most=6)
    assert groups.estimate is not None and 1 <= groups.estimate.num_classes - 3 <= 6
    assert set(groups.estimate.curve) <= set(range(3, 10)) and not any(one.fits_known for one in groups.members)


def test_the_estimate_may_find_nothing_new() -> None:
    known, axis = blobs({0: 20, 1: 20, 2: 20}, seed=1, spread=0.4)
    vectors, _ = blobs({0: 20, 1: 20, 2: 20}, seed=2, spread=0.4)
    groups = group_features(features_of(vectors), known, list(map(str, axis)))
    assert groups.estimate is not None and groups.estimate.num_classes == 3
    assert groups.new == [] and all(one.fits_known for one in groups.members)


# A run's features


def test_features_are_what_the_head_reads(tiny_run: MakeRun, image_folder: Path, tmp_path: Path) -> None:
    files = sorted((image_folder / "studio").rglob("*.png"))[:5]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    for method in ("patchgen", "lp-ln"):
        predictor, ticks = load_run(tiny_run(method).path), list[int]()
        found = read_features(predictor, [files[0], broken, *files[1:]], batch=2, tick=ticks.append)
        assert [one.path for one in found.predictions] == files and [one.path for one in found.unreadable] == [broken]
        assert ticks == [2, 2, 2] and all((one.mask is None) == (method == "lp-ln") for one in found.predictions)
        with torch.no_grad():
            inputs = predictor.inputs([decode(path, 56) for path in files])
            expected = predictor.model(inputs).features.numpy()
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found.vectors, expected, atol=1e-4)
    with pytest.raises(ValueError, match="none of the 1 images could be read; the first, .*broken.png"):
        group_features(read_features(predictor, [broken]), found.vectors, ["a"] * 5)


# The reference


def test_the_reference_is_the_training_part_of_the_sources(tiny_run: MakeRun, image_folder: Path) -> None:
    run = tiny_run()
    known = reference_images(run)
    rows = list(csv.DictReader((run.path / "splits.csv").open()))
    trained = {image_folder / r["path"]: r["label"] for r in rows if r["part"] == "in" and r["domain"] != "studio"}
    assert {file: name for name, files in known.items() for file in files} == trained
    few = reference_images(run, per_class=3)
    assert list(few) == ["circle", "cross", "square"]
    assert all(len(few[name]) == 3 and {*few[name]} < {*known[name]} for name in few)
    assert few == reference_images(run, per_class=3)


def test_unknown_classes_are_no_reference(tiny_run: MakeRun) -> None:
    for method in ("patchgen", "all-labels"):  # all-labels is given the hidden labels, and still they are not known
        run = tiny_run(method, task="mdg_gcd", known="circle,square", swad=False)
        known = reference_images(run)
        assert known.keys() == {"circle", "square"}
        assert all(file.parent.name == name for name, files in known.items() for file in files)


def test_data_that_moved(tiny_run: MakeRun, image_folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(tiny_run().path, tmp_path / "run"))
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace(str(image_folder), str(tmp_path / "gone")))
    with pytest.raises(ValueError, match="'gone' is not in .*give it with `--data`"):
        reference_images(run)
    moved = shutil.copytree(image_folder, tmp_path / "moved")
    counts = [
        [len(files) for files in known.values()]
        for known in (reference_images(run, str(moved)), reference_images(tiny_run()))
    ]
    assert counts[0] == counts[1]
    (moved / "clinic/circle/00.png").unlink()
    with pytest.raises(ValueError, match="not the same data.*`--data`"):
        reference_images(run, str(moved))


# A new site is not a new class


def test_a_group_that_the_classifier_names_alike_and_confidently_is_that_class() -> None:
    """As webcam monitors: far from the training images in features, and all of them called monitors."""
    vectors, axis = blobs({0: 7, 4: 20, 5: 10, 6: 9})
    labels = [{0: "ant", 4: "bee", 5: "cat", 6: ("ant", "bee")[i % 2]}[a] for i, a in enumerate(axis)]
    sure = [{0: 0.9, 4: 0.95, 5: 0.6, 6: 0.99}[a] for a in axis]  # 5: not sure; 6: not alike
    features = features_of(vectors, labels, sure)  # type: ignore[arg-type]
    groups = group_features(features, *known_blobs(), new_classes=3)
    name = {0: "ant", 4: "bee", 5: "new-1", 6: "new-2"}
    assert [one.group for one in groups.members] == [name[a] for a in axis]
    assert [one.fits_known for one in groups.members] == [a in (0, 4) for a in axis]
    assert groups.new == ["new-1", "new-2"] and groups.renamed == {"bee": 20}
    easier = group_features(features, *known_blobs(), new_classes=3, rule=Rule(0.9, 0.6))
    assert easier.new == ["new-1"] and easier.renamed == {"bee": 20, "cat": 10}


def test_the_rule_is_calibrated_on_left_out_sites(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(tiny_run().path, tmp_path / "run"))
    label = np.repeat([0, 1, 2], 10)
    probabilities = np.full((30, 3), 0.1, np.float32)
    probabilities[np.arange(30), label] = 0.8
    probabilities[:2] = [0.1, 0.7, 0.2]  # 80 % of class 0 are right
    probabilities[10:20, 1] = 0.75
    probabilities[20:27] = [0.9, 0.05, 0.05]  # class 2 is mostly mistaken, and does not count
    save_predictions(run.path, "selected", Predictions(np.arange(30), label, probabilities), ("a", "b", "c"))
    rule = calibrated_rule(run)
    assert (rule.agreement, rule.confidence) == pytest.approx((0.8, 0.75)) and rule.images == 30
    assert rule.sites == ("studio",) and "calibrated on 30 images of studio" in str(rule)
    predictions_file(run.path, "selected").unlink()
    assert calibrated_rule(run) == Rule() and "not calibrated" in str(Rule())

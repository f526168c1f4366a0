"""Scoring of a stage: against the general accuracy, by hand, and on blobs whose clusters are known."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from patchgen.ccd.data import Stream, read_stream
from patchgen.ccd.scores import discover, forgetting, halve_held_out, score, validation_score
from patchgen.ccd.stages import Schedule
from patchgen.discovery import clustering_accuracy

ENTRY = np.array([0, 0, 1, 1, 2])  # of five classes


def blobs(label: np.ndarray, seed: int = 0) -> torch.Tensor:
    """Tight groups around the axes, one a class."""
    noise = np.random.default_rng(seed).normal(0, 0.02, (len(label), 8))
    return torch.from_numpy(np.eye(8)[label] + noise).float()


def test_scores_are_those_of_the_general_accuracy() -> None:
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 5, 200)
    clusters = np.where(rng.random(200) < 0.6, (truth + 1) % 5, rng.integers(0, 6, 200))
    found = score(truth, clusters, ENTRY, stage=2)
    for name, known in (("hard", [0, 1]), ("soft", [0, 1, 2, 3])):
        expected = clustering_accuracy(truth, clusters, known)
        assert found["all"]["accuracy"] == pytest.approx(expected.all)
        assert found[name]["known"]["accuracy"] == pytest.approx(expected.known)
        assert found[name]["unknown"]["accuracy"] == pytest.approx(expected.unknown)
    groups = found["groups"]
    assert groups.keys() == {"0", "1", "2"} and groups["2"] == found["soft"]["unknown"]
    assert sum(cell["images"] for cell in groups.values()) == 200


def test_errors_are_binomial_and_missing_sides_are_left_out() -> None:
    found = score(np.array([0, 0, 0, 1]), np.array([5, 5, 6, 7]), ENTRY, stage=1)
    assert found["all"] == {"accuracy": 0.75, "error": pytest.approx(math.sqrt(0.75 * 0.25 / 4)), "images": 4}
    assert found["hard"].keys() == {"known"} and found["groups"].keys() == {"0"}
    assert found["ari"] == pytest.approx((1 - 3 * 1 / 6) / ((3 + 1) / 2 - 3 * 1 / 6))  # pairs: together, by chance
    entropy = [-sum(p * math.log(p) for p in shares) for shares in ((3 / 4, 1 / 4), (1 / 2, 1 / 4, 1 / 4))]
    assert found["nmi"] == pytest.approx(entropy[0] / (sum(entropy) / 2))  # the clusters determine the class


def test_clusters_keep_their_ids_from_stage_to_stage() -> None:
    first, second, third = np.repeat([0, 1], 6), np.repeat([1, 2, 3], 5), np.repeat([0, 2, 3, 4], 4)
    one = discover(blobs(second), blobs(first, 1), first, clusters=4, first_new=2)
    assert (one.assignment[:5] == 1).all() and set(one.assignment[5:]) == {2, 3}
    labels = np.concatenate([first, one.assignment])
    known = torch.cat([blobs(first, 1), blobs(second)])
    two = discover(blobs(third, 2), known, labels, clusters=5, first_new=4)
    ids = dict(zip(third.tolist(), two.assignment.tolist(), strict=True))
    then = dict(zip(second.tolist(), one.assignment.tolist(), strict=True))
    assert ids == {0: 0, 2: then[2], 3: then[3], 4: 4}
    assert (two.predict(blobs(third, 5)) == two.assignment).all()


def test_forgetting_is_the_fall_from_the_best_stage() -> None:
    def at(**groups: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"groups": {name[1:]: {"accuracy": value} for name, value in groups.items()}}

    found = forgetting([at(g0=0.9), at(g0=0.95, g1=0.5)], at(g0=0.8, g1=0.6, g2=0.7))
    assert found == {"0": pytest.approx(0.15), "1": pytest.approx(-0.1)}


def test_validation_reads_no_label_of_a_new_class() -> None:
    truth, clusters = np.array([0, 0, 1, 1, 2, 2, 3]), np.array([5, 5, 6, 5, 5, 6, 7])
    found = validation_score(truth, clusters, known=np.array([0, 1]))
    assert found == 0.75
    other = np.array([0, 0, 1, 1, 3, 2, 2])
    assert validation_score(other, clusters, known=np.array([0, 1])) == found


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    for name, count in (("ant", 20), ("bee", 20), ("cat", 20), ("dog", 2)):
        (tmp_path / "x" / name).mkdir(parents=True)
        for i in range(count):
            (tmp_path / "x" / name / f"{i:02d}.jpg").touch()
    return read_stream(tmp_path / "x", Schedule((0.5, 0.5), ((0.8, 1.0), (1.0,))), holdout=0.2)


def test_held_out_images_choose_or_score_never_both(stream: Stream) -> None:
    choose, rate = halve_held_out(stream)
    assert sorted([*choose, *rate]) == stream.held_out.tolist()
    assert np.bincount(stream.label[choose], minlength=4).tolist() == [2, 2, 2, 0]
    assert np.bincount(stream.label[rate], minlength=4).tolist() == [2, 2, 2, 1]
    assert set(stream.label[stream.entered(rate, 0)]) == {0, 1}

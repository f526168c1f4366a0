"""The paper's inequalities: analytic cases, what holds at every s, and what must fail when an assumption is broken."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from patchgen.data.oracle import SUITE
from patchgen.theory import bounds, measure, oracle
from patchgen.theory.bounds import DomainRisk, Head, judge

RNG = np.random.default_rng(0)


# verdicts


@pytest.mark.parametrize(("measured", "bound", "sense", "trivial", "status", "tightness"), [
    (0.2, 0.4, "at most", 1.0, "holds", 0.5),
    (0.2, 1.5, "at most", 1.0, "vacuous", 0.2 / 1.5),
    (0.5, 0.4, "at most", 1.0, "violated", 1.25),
    (2.0, 1.5, "at most", 1.0, "violated", 2 / 1.5),  # a bound that says nothing can still be wrong
    (0.0, 0.0, "at most", 1.0, "holds", None),
    (3.0, 1.5, "at least", 0.0, "holds", 0.5),
    (3.0, -1.5, "at least", 0.0, "vacuous", None),
    (1.0, 1.5, "at least", 0.0, "violated", 1.5),
    (math.nan, 0.4, "at most", 1.0, "violated", None),
])  # fmt: skip
def test_verdicts(measured: float, bound: float, sense: Any, trivial: float, status: str, tightness: Any) -> None:
    row = judge("x", "y", "z", measured, bound, sense, trivial)
    assert row.status == status and row.tightness == (None if tightness is None else pytest.approx(tightness))


def errors(share: float, n: int = 100) -> np.ndarray:
    return np.arange(n) < share * n


@pytest.mark.parametrize(
    ("subset", "everything", "status"), [(0.0, 0.02, "holds"), (0.75, 0.0, "violated"), (0.58, 0.58, "vacuous")]
)
def test_two_equally_bad_rules_show_no_equal_bayes_risk(subset: float, everything: float, status: str) -> None:
    row = bounds.equal_bayes_risk(errors(subset), errors(everything), 4, "C*")
    assert row.status == status and row.bound == pytest.approx(math.sqrt(2 * math.log(40) / 100))
    assert row.measured == max(subset, everything)


# pure functions


def test_rademacher_is_the_mean_over_all_signs() -> None:
    phi = RNG.normal(size=(8, 3))
    exact = np.mean([np.linalg.norm(np.array(signs) @ phi) for signs in product((-1, 1), repeat=8)]) / 8
    found, error = bounds.rademacher(phi, seed=1)
    assert abs(found - exact) < 5 * error and 0 < error < 0.05 * exact


def test_orthogonal_features_attain_the_complexity_bound() -> None:
    row = bounds.complexity(3.0 * np.eye(16), 3.0, 1, "C*", seed=1)  # |sum of signs e_i| = sqrt(n), always
    assert row.status == "holds" and row.tightness == pytest.approx(1) and row.bound == pytest.approx(3 / 4)


def test_scaling_is_the_slope() -> None:
    assert bounds.scaling([1, 4, 16], [0.5, 1.0, 2.0]).measured == pytest.approx(0, abs=1e-12)
    assert bounds.scaling([1, 4, 16], [1.0, 4.0, 16.0]).status == "violated"


def test_generalization_bound_by_hand() -> None:
    train, test, v = np.array([[2.0]] * 4), np.array([[2.0], [-2.0]]), np.array([1.0])
    row = bounds.generalization(train, test, [(v, np.ones(4), np.ones(2))], 2.0, 1, "C*")
    assert row.measured == 0.5  # no loss on the sample; one of two fresh ones is wrong by more than the ramp
    assert row.bound == pytest.approx(2 * 2 / 2 + 3 * math.sqrt(math.log(40) / 8)) and row.status == "vacuous"


def test_lipschitz_constant_is_an_upper_limit_that_is_reached() -> None:
    head = Head(np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2))
    step = np.array([[1e-5, 0.0]])
    slope = abs(head.loss(step, np.array([0])) - head.loss(-step, np.array([0])))[0] / 2e-5
    assert slope == pytest.approx(head.lipschitz, rel=1e-4) and head.lipschitz == pytest.approx(0.5)
    wide = Head(RNG.normal(size=(4, 5)), RNG.normal(size=4))
    a, b, label = RNG.normal(size=(500, 5)), RNG.normal(size=(500, 5)), RNG.integers(0, 4, 500)
    ratio = abs(wide.loss(a, label) - wide.loss(b, label)) / np.linalg.norm(a - b, axis=1)
    assert ratio.max() <= wide.lipschitz
    logits = np.array([0.3, -1.0, 2.0])
    loss = Head(np.eye(3), np.zeros(3)).loss(logits[None], np.array([1]))[0]
    assert loss == pytest.approx(1 - np.exp(-1.0) / np.exp(logits).sum())


def test_two_domains_and_deviation_take_the_tightest() -> None:
    risks = {"a": DomainRisk(0.1, 0.1, 0.01), "b": DomainRisk(0.3, 0.1, 0.02), "c": DomainRisk(0.1, 0.1, 0.0)}
    pair = bounds.two_domains(risks, 20.0, "m")
    assert pair.measured == pytest.approx(0.2) and pair.bound == pytest.approx(0.4) and pair.note.startswith("b and c")
    one = bounds.risk_deviation(risks, 20.0, "m")
    assert one.note.startswith("in b") and one.bound == pytest.approx(0.4) and one.status == "holds"


def test_separation_by_hand() -> None:
    oracle_points = np.array([[0.0], [1.0], [10.0], [12.0]])  # centres 0.5 and 11, r = 1
    label = np.array([0, 0, 1, 1])
    row = bounds.separation(oracle_points + [[0.5], [0.5], [-0.5], [0.0]], oracle_points, label, 0.5, "m")
    assert (
        row.note.startswith("gamma 10.5, r 1,")
        and row.bound == pytest.approx(10.5 - 2 * 1.5)
        and row.measured == pytest.approx(8.0)
        and row.status == "holds"
    )


def test_pooled_map_does_not_expand_and_reaches_one() -> None:
    a, b = RNG.normal(size=(2, 20, oracle.PATCHES * 3))
    assert (np.linalg.norm(measure.pooled(a) - measure.pooled(b), axis=1) <= np.linalg.norm(a - b, axis=1)).all()
    assert np.linalg.norm(measure.pooled(np.ones((1, oracle.PATCHES)))) == pytest.approx(oracle.PATCHES**0.5)


# the data


def test_masks_have_the_error_they_say() -> None:
    truth = RNG.random((200, 36)) < 0.3
    noisy = oracle.noisy_mask(truth, seed=1, epsilon=0.05)
    assert np.abs(noisy - truth).mean() == pytest.approx(0.05, rel=0.05)
    assert noisy.min() >= 0 and noisy.max() <= 1 and abs(noisy - truth).sum(1).max() <= 2 * 0.05 * 36
    one = np.zeros((1, 36), bool)
    one[0, 11] = True  # the end of the second row comes round to its start
    assert np.flatnonzero(oracle.shifted_mask(one)[0]).tolist() == [6]


@pytest.mark.parametrize("size", [1, 4, 12, 35, 36])
def test_the_law_of_the_predictive_patches_is_one(size: int) -> None:
    spec = oracle.local_spec(size, per_class=2, seed=5)
    found = oracle.draw(spec, lambda patches: patches.reshape(len(patches), -1).astype(float), couple=True)
    phi = [bounds.masked(found.z, found.truth)[found.rows(name)] for name in found.domains]
    assert (found.truth.sum(1) == size).all() and all(np.array_equal(phi[0], other) for other in phi[1:])
    context = [bounds.masked(found.z, ~found.truth)[found.rows(name)] for name in found.domains]
    assert np.array_equal(context[0], context[3]) == (size == 36)


def test_backgrounds_of_coupled_images_follow_each_domain() -> None:
    spec = replace(oracle.local_spec(4, per_class=20, seed=5), classes=2)
    own: dict[int, list[bool]] = {}
    for sample in oracle.coupled(oracle.Oracle(spec)):
        own.setdefault(sample.domain, []).append(sample.background == sample.label)
    assert [np.mean(own[d]) for d in range(4)] == pytest.approx([d.correlation for d in spec.domains], abs=0.026)


# the whole


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """160 images: with fewer than about 120 the bound of Cor. C.1 at s = 12 is above 1, and no loss can break it."""
    ticks: list[int] = []
    result = measure.measure_oracle((12, 36), images=160, seed=3, tick=ticks.append)
    assert sum(ticks) == measure.check_arguments((12, 36), 160, 3)
    return result


def test_no_row_is_violated_where_the_premises_hold(found: dict[str, Any]) -> None:
    assert [r for r in found["rows"] if r["status"] == "violated"] == []
    results = {"Prop. 3.1", "Prop. 3.2", "Prop. 3.3", "Cor. 3.1", "Cor. C.1", "Cor. C.2", "Lemma C.1", "Lemma C.2"}
    for size in (12, 36):
        assert {r["result"] for r in found["rows"] if r["size"] == size} == results
    at_p = [r for r in found["rows"] if r["size"] == 36]
    assert {r["result"] for r in at_p if r["status"] == "holds"} >= results - {"Cor. C.1"}


def test_every_broken_assumption_is_a_violation(found: dict[str, Any]) -> None:
    assert {r["premises"]: r["status"] for r in found["broken"] if r["status"] != "violated"} == {}
    assert {r["result"] for r in found["broken"]} == {r["result"] for r in found["rows"]}


def test_with_the_true_mask_the_domains_have_one_risk(found: dict[str, Any]) -> None:
    exact = [r for r in found["rows"] if r["result"] == "Prop. 3.2" and r["case"] == "true mask"]
    assert len(exact) == 2 and all(r["bound"] == 0 and r["measured"] < 1e-9 for r in exact)


# a run


def test_a_run_has_the_same_rows_marked_approximate(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITE, "oracle-small", replace(SUITE["oracle-shortcut"], per_class=10))
    run = tiny_run(data="oracle-small", unseen="mist", image_size=84, augment=False)
    result = measure.measure_run(run.path, images=32)
    assert {r["premises"] for r in result["rows"]} == {"approximate"} and {r["size"] for r in result["rows"]} == {6}
    assert {r["result"] for r in result["rows"]} >= {"Prop. 3.1", "Prop. 3.2", "Prop. 3.3", "Cor. 3.1", "Lemma C.1"}
    complexity = [r for r in result["rows"] if r["quantity"] == "Rademacher complexity"]
    assert all(r["status"] == "holds" for r in complexity)  # B is measured, so nothing about it is approximate


def test_a_run_without_truth_or_mask_is_refused(tiny_run: Any) -> None:
    with pytest.raises(ValueError, match="has no true masks"):
        measure.measure_run(tiny_run().path, images=32)
    with pytest.raises(ValueError, match="has no mask"):
        measure.measure_run(tiny_run("lp").path, images=32)


@pytest.mark.parametrize(("change", "text"), [
    ({"sizes": (37,)}, r"1\.\.36 patches, got 37"),
    ({"sizes": (0,)}, "got 0"),
    ({"sizes": ()}, "at least one number"),
    ({"images": 31}, "at least 32.*got 31"),
    ({"seed": -1}, "negative, got -1"),
])  # fmt: skip
def test_mistakes(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        measure.measure_oracle(**{"sizes": (1,), "images": 32, "seed": 1} | change)

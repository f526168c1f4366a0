"""Expectation, choice, temperature and distances against scipy, by hand and on planted answers."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import LedoitWolf

from patchgen.fit.calibrate import fit_familiar, fit_temperature, negative_log_likelihood, spread
from patchgen.fit.expect import Choice, choose, expect, reach
from patchgen.tasks.metrics import calibration_error

FOLDS = {"berlin": 0.62, "lyon": 0.71, "turin": 0.66, "graz": 0.7}
MANY = dict.fromkeys(FOLDS, 10**9)  # images, so that counting them adds nothing


def test_intervals_are_students() -> None:
    found, values = expect(FOLDS, MANY), np.array(list(FOLDS.values()))
    assert found.mean == pytest.approx(0.6725) == float(found) and found.folds == FOLDS
    assert found.interval == pytest.approx(stats.t.interval(0.95, 3, values.mean(), stats.sem(values)))
    # by hand: t(0.975; 3) = 3.18245, s = 0.041130, so one more site lies within 3.18245 * 0.041130 * sqrt(1.25)
    assert values.std(ddof=1) == pytest.approx(0.041130, abs=1e-6)
    reach = 3.182446 * 0.041130 * math.sqrt(1.25)
    assert found.new_site == pytest.approx((0.6725 - reach, 0.6725 + reach), abs=1e-5)


def test_intervals_stay_within_shares_and_need_two_sites() -> None:
    assert expect({"a": 0.2, "b": 0.9}, {"a": 50, "b": 50}).new_site == (0.0, 1.0)
    alone = expect({"a": 0.5}, {"a": 50})
    assert alone.interval is None and alone.new_site is None and "no interval" in str(alone)


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_sites_that_agree_are_as_uncertain_as_their_images_are_few(accuracy: float) -> None:
    found = expect(dict.fromkeys("abc", accuracy), dict.fromkeys("abc", 24))
    # by hand: q = 25 / 26, so e = sqrt(25 / 26 / 26 / 24) = 0.03925464
    reach = 1.959964 * 0.03925464 * math.sqrt(4 / 3)
    assert found.new_site == pytest.approx((max(0, accuracy - reach), min(1, accuracy + reach)), abs=1e-6)
    assert found.interval == pytest.approx((max(0, accuracy - reach / 2), min(1, accuracy + reach / 2)), abs=1e-6)


def test_each_site_counts_with_its_own_images() -> None:
    found = expect({"small": 0.5, "large": 0.5}, {"large": 98, "small": 8})  # e^2 is the mean of 1/32 and 1/392
    reach = 1.959964 * math.sqrt((1 / 32 + 1 / 392) / 2 * 1.5)
    assert found.new_site == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-6)


def test_a_new_site_lies_inside_as_often_as_is_said() -> None:
    rng, hits = np.random.default_rng(0), 0
    for draw in rng.normal(0.6, 0.05, (2000, 5)):
        low, high = expect(dict(zip("abcd", draw[:4], strict=True)), dict.fromkeys("abcd", 10**9)).new_site or (1, 0)
        hits += low <= draw[4] <= high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("accuracy", [0.5, 0.8, 0.97, 0.99])
def test_few_images_do_not_make_the_intervals_too_narrow(accuracy: float) -> None:
    rng, hits = np.random.default_rng(1), np.zeros(3)
    for right in rng.binomial(24, accuracy, (1000, 4)) / 24:
        found = expect(dict(zip("abc", right[:3], strict=True)), dict.fromkeys("abc", 24))
        (low, high), (least, most) = found.new_site or (1, 0), found.interval or (1, 0)
        hits += low <= accuracy <= high, low <= right[3] <= high, least <= accuracy <= most
    assert (hits / 1000 > 0.95).all()  # of Student's interval alone, 51 % of the first at an accuracy of 0.99


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn from softmax(z), logits three times as sure: (400, 4)."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(400, 4, generator=generator, dtype=torch.double) * 1.5
    label = torch.multinomial(z.softmax(1), 1, generator=generator)[:, 0]
    return 3 * z, label


def test_temperature_is_the_best_of_a_grid(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = fit_temperature(*logits)
    grid = np.exp(np.linspace(math.log(0.1), math.log(10), 2001))
    losses = [negative_log_likelihood(*logits, temperature) for temperature in grid]
    assert found == pytest.approx(grid[int(np.argmin(losses))], rel=0.003)
    assert found == pytest.approx(3, rel=0.2)
    assert calibration_error((logits[0] / found).softmax(1).numpy(), logits[1].numpy()) < 0.05
    assert calibration_error(logits[0].softmax(1).numpy(), logits[1].numpy()) > 0.1


def test_temperature_claims_no_certainty_without_mistakes() -> None:
    assert fit_temperature(torch.eye(3) * 5, torch.arange(3)) == 1.0


def test_distances_are_mahalanobis_to_the_nearest_class() -> None:
    rng = np.random.default_rng(1)
    label = np.repeat([0, 2], 150)  # class 1 has no training image
    features = rng.normal(0, [1, 3, 0.5], (300, 3)) + np.array([[4, 0, 0], [-4, 0, 2]])[label // 2]
    held_out = rng.normal(0, [1, 3, 0.5], (200, 3)) + np.array([4, 0, 0])
    familiar = fit_familiar(torch.from_numpy(features), torch.from_numpy(label), torch.from_numpy(held_out))
    centres = np.stack([features[label == c].mean(0) for c in (0, 2)])
    within = features - centres[label // 2]
    precision = np.linalg.inv(LedoitWolf(assume_centered=True).fit(within).covariance_)
    expected = [min(mahalanobis(x, c, precision) for c in centres) for x in held_out]
    np.testing.assert_allclose(familiar.distance(torch.from_numpy(held_out)).numpy(), expected, rtol=1e-4)
    assert 0 <= sum(familiar.unlike(torch.from_numpy(held_out))) <= 2  # 1 % of 200
    assert familiar.unlike(torch.tensor([[0.0, 0.0, 40.0], [4.0, 0.0, 0.0]])) == [True, False]


def test_features_without_spread_do_not_break_it() -> None:
    features = torch.zeros(20, 3, dtype=torch.double)
    familiar = fit_familiar(features, torch.arange(20) % 2, features)
    assert familiar.unlike(features[:2]) == [False, False] and familiar.unlike(features[:1] + 1) == [True]


def test_spread_takes_the_same_of_each_part() -> None:
    parts = [np.arange(100), np.arange(100, 105), np.arange(200, 300)]
    found = spread(parts, 30, seed=1)
    assert [((found >= a) & (found < a + 100)).sum() for a in (0, 100, 200)] == [10, 5, 10]
    assert len(set(found.tolist())) == 25


# Which method is kept: planted answers whose truth is known, and the estimate that allows for the choice


def site(share: float, count: int = 100) -> np.ndarray:
    """The first `share` of the images are right."""
    return np.arange(count) < round(share * count)


def chosen(*sites: tuple[float, ...]) -> Choice:
    """One tuple of accuracies per site, a method each."""
    names = ("simple", "second", "third")[: len(sites[0])]
    return choose({name: {f"site {k}": site(row[i]) for k, row in enumerate(sites)} for i, name in enumerate(names)})


def counted(choice: Choice) -> list[str]:
    return list(choice.counted.values())


def test_a_method_that_is_better_by_construction_is_kept() -> None:
    choice = chosen((0.6, 0.9), (0.55, 0.84), (0.7, 0.99))
    [found] = choice.comparisons
    assert choice.chosen == "second" and found.shown and counted(choice) == ["second"] * 3
    assert (found.better, found.worse, choice.images) == (88, 0, 300)
    assert found.difference == pytest.approx(0.88 / 3)


def test_of_two_equal_methods_the_simpler_is_kept() -> None:
    choice = chosen((0.8, 0.8), (0.7, 0.7), (0.9, 0.9))
    assert choice.chosen == "simple" and choice.comparisons[0].difference == 0 and counted(choice) == ["simple"] * 3


@pytest.mark.parametrize(("sites", "why"), [
    (((0.80, 0.81), (0.70, 0.71), (0.90, 0.91), (0.6, 0.61)), "one image a site is chance"),
    (((0.5, 0.9), (0.8, 0.8), (0.8, 0.78)), "one site alone does not speak for the next"),
    (((0.9, 0.7), (0.9, 0.7)), "worse"),
])  # fmt: skip
def test_no_more_than_chance_keeps_the_simpler(sites: tuple[tuple[float, ...], ...], why: str) -> None:
    assert chosen(*sites).chosen == "simple", why


def test_what_is_needed_is_students_bound_or_that_of_the_images() -> None:
    differences = np.array([0.3, 0.35, 0.25])
    assert reach(differences, [0.0] * 3, 0.95) == pytest.approx(2.91999 * 0.05, abs=1e-6)  # t(0.95, 2), s = 0.05
    assert reach(differences, [0.04] * 3, 0.95) == pytest.approx(1.644854 * 0.2, abs=1e-6)


def test_images_of_one_patient_count_together() -> None:
    """Ten patients; the later method wins all images of six and loses all of four: no evidence, were it 100 images."""
    better = np.repeat(np.arange(10) < 6, 10)
    right = {"simple": dict.fromkeys("ab", ~better), "second": dict.fromkeys("ab", better)}
    alone = choose(right).comparisons[0]
    grouped = choose(right, dict.fromkeys("ab", np.repeat(np.arange(10), 10))).comparisons[0]
    assert grouped.needed > 2 * alone.needed and alone.difference == grouped.difference
    # by hand: sums of the patients about the mean difference 0.2 are +8 (six times) and -12 (four times)
    variance = (6 * 8**2 + 4 * 12**2) / 100**2 * 10 / 9
    assert grouped.needed == pytest.approx(1.644854 * np.sqrt(variance / 2), rel=1e-5)


def test_each_site_counts_with_the_method_that_the_others_prefer() -> None:
    choice = chosen((0.6, 0.90), (0.6, 0.89), (0.6, 0.91), (0.6, 0.50))
    assert counted(choice) == ["simple"] * 3 + ["second"] and choice.chosen == "simple"
    # the last site speaks against it: seen, it keeps the simple one; unseen, it counts with what the others keep
    two = chosen((0.6, 0.90), (0.6, 0.90))
    assert two.chosen == "second" and counted(two) == ["simple"] * 2  # a single other site shows nothing


def test_of_three_each_must_beat_what_is_kept() -> None:
    choice = chosen((0.5, 0.8, 0.8), (0.5, 0.8, 0.81), (0.5, 0.8, 0.8))
    assert choice.chosen == "second"
    assert [(one.method, one.against, one.shown) for one in choice.comparisons] == [
        ("second", "simple", True), ("third", "second", False)]  # fmt: skip


@pytest.mark.parametrize("sites", [2, 4])
def test_equal_methods_are_rarely_told_apart(sites: int) -> None:
    rng, kept = np.random.default_rng(sites), 0
    for _ in range(400):
        right: dict[str, dict[str, np.ndarray]] = {"simple": {}, "second": {}}
        for i, shift in enumerate(rng.normal(0, 0.05, sites)):  # sites differ in which method they prefer
            right["simple"][str(i)] = rng.random(100) < 0.8
            right["second"][str(i)] = rng.random(100) < 0.8 + shift
        kept += choose(right).chosen == "second"
    assert kept / 400 <= 0.075  # 5 %, and two standard errors of 400 draws

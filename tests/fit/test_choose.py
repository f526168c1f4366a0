"""Which method is kept: planted answers whose truth is known, and the estimate that allows for the choice."""

import numpy as np
import pytest

from patchgen.fit.expect import Choice, choose, reach


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


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        (((0.80, 0.81), (0.70, 0.71), (0.90, 0.91), (0.6, 0.61)), "one image a site is chance"),
        (((0.5, 0.9), (0.8, 0.8), (0.8, 0.78)), "one site alone does not speak for the next"),
        (((0.9, 0.7), (0.9, 0.7)), "worse"),
    ],
)
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

"""The mixture against scikit-learn, EM against its promise, and the host's collapse as a case that must not return."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.ccd.mixture import KAPPA, Groups, Prior, SphericalMixture, grow


def blobs(
    classes: int, dim: int, per_class: int, noise: float, seed: int = 0, uneven: float = 0.8
) -> tuple[Tensor, Tensor]:
    """Unit rows (N, D), float64, around random directions; widths differ up to a factor 1 + uneven; their classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(classes, dim, generator=generator, dtype=torch.float64), dim=1)
    width = noise * (1 + uneven * torch.rand(classes, 1, 1, generator=generator, dtype=torch.float64)) / math.sqrt(dim)
    draws = torch.randn(classes, per_class, dim, generator=generator, dtype=torch.float64)
    rows = F.normalize((centres[:, None] + width * draws).flatten(0, 1), dim=1)
    return rows, torch.arange(classes).repeat_interleave(per_class)


def some_rows(rows: Tensor, count: int, seed: int = 0) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]


def hard_start(rows: Tensor, means: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The documented start, row by row: weights and variances of the rows nearest to each mean."""
    errors: list[list[float]] = [[] for _ in means]
    for x in rows:
        distance = (x - means).square().sum(1)
        errors[int(distance.argmin())].append(float(distance.min()))
    variances = [sum(e) / len(e) / rows.shape[1] for e in errors]
    return np.array([len(e) for e in errors]) / len(rows), np.array(variances)


def scikit_em(rows: Tensor, means: Tensor, steps: int) -> list[tuple[np.ndarray, ...]]:
    """Weights, means, variances and mean log-likelihood after each step of scikit-learn's EM."""
    from sklearn.mixture import GaussianMixture

    weights, variances = hard_start(rows, means)
    reference = GaussianMixture(
        len(means), covariance_type="spherical", tol=0, reg_covar=0, max_iter=1, warm_start=True,
        weights_init=weights, means_init=means.numpy(), precisions_init=1 / variances,
    )  # fmt: skip
    states = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one step does not converge
        for _ in range(steps):
            reference.fit(rows.numpy())
            likelihood = reference.score(rows.numpy())
            states.append((reference.weights_, reference.means_, reference.covariances_, likelihood))
    return states


# the fit


@pytest.mark.parametrize(("classes", "dim", "noise"), [(4, 3, 0.8), (8, 16, 1.0), (10, 96, 1.5)])
def test_em_is_that_of_scikit_learn_from_the_same_start(classes: int, dim: int, noise: float) -> None:
    rows, _ = blobs(classes, dim, 40, noise)
    start = some_rows(rows, classes)
    ours = SphericalMixture.fit(7 * rows, classes, start=start, iterations=12, tolerance=0, regularisation=0)
    steps = len(ours.history) - 1
    assert steps >= 4
    theirs = scikit_em(rows, start, steps)
    np.testing.assert_allclose(ours.history[1:], [state[3] for state in theirs], rtol=1e-9, atol=1e-9)
    weights, means, variances, _ = theirs[-1]
    np.testing.assert_allclose(ours.weights, weights, rtol=1e-5)
    np.testing.assert_allclose(ours.means, means, atol=1e-6)
    np.testing.assert_allclose(ours.variances, variances, rtol=1e-5)


def test_responsibilities_and_likelihood_are_those_of_scikit_learn() -> None:
    from sklearn.mixture import GaussianMixture

    rows, _ = blobs(5, 12, 30, 1.0)
    ours = SphericalMixture.fit(rows, 5).to(torch.float64)
    theirs = GaussianMixture(5, covariance_type="spherical")
    theirs.weights_, theirs.means_ = ours.weights.numpy(), ours.means.numpy()
    theirs.covariances_ = ours.variances.numpy()
    theirs.precisions_cholesky_ = 1 / np.sqrt(theirs.covariances_)
    joint = theirs._estimate_weighted_log_prob(rows.numpy())
    expected = joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)
    np.testing.assert_allclose(ours.log_responsibilities(rows), expected, rtol=1e-5, atol=1e-5)
    assert ours.log_likelihood(rows) == pytest.approx(theirs.score(rows.numpy()), rel=1e-9)
    assert ours.log_likelihood(rows) == pytest.approx(ours.history[-1], rel=1e-5)


@pytest.mark.parametrize("floor", [0.0, 0.06, 0.2])
@pytest.mark.parametrize("seed", range(2))
def test_the_likelihood_never_falls(seed: int, floor: float) -> None:
    """Nothing but the top of the climb may end it early, whether the floor is out of reach, holds some or holds all."""
    rows, _ = blobs(6, 8, 25, 0.8, seed)
    start = some_rows(rows, 6, seed)
    fitted = SphericalMixture.fit(rows, 6, start=start, iterations=30, tolerance=0, regularisation=floor)
    assert len(fitted.history) == 31 or abs(fitted.history[-1] - fitted.history[-2]) < 1e-9
    assert np.diff(fitted.history).min() >= 0 and fitted.history[-1] > fitted.history[0] + 0.01
    assert fitted.variances.min() >= floor * (1 - 1e-6)
    held = int((fitted.variances <= floor * (1 + 1e-6)).sum())
    assert {0.0: held == 0, 0.06: 1 <= held <= 5, 0.2: held == 6}[floor]


def test_a_warm_start_keeps_ids_and_adds_what_is_missing() -> None:
    """Twelve known means (more than ten: names must not be sorted as text) and three new blobs."""
    rows, classes = blobs(15, 32, 20, 0.4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    known = torch.stack([rows[classes == c].mean(0) for c in order])
    grown = SphericalMixture.fit(rows, 15, start=known)
    for component, c in enumerate(order):
        assert (grown.nearest(rows[classes == c], 1) == component).all()
    new = [set(grown.nearest(rows[classes == c], 1).flatten().tolist()) for c in (12, 13, 14)]
    assert sorted(new, key=min) == [{12}, {13}, {14}]


def test_replay_keeps_a_class_whose_images_are_gone() -> None:
    rows, classes = blobs(4, 32, 40, 0.5)
    last = SphericalMixture.fit(rows[classes < 3], 3)
    replay = last.sample(40, torch.Generator().manual_seed(0))
    assert replay.shape == (3, 40, 32)
    now = SphericalMixture.fit(rows[classes == 3], 4, start=last.means, replay=replay)
    assert F.cosine_similarity(now.means[:3], last.means).min() > 0.99
    assert (now.means[:3].norm(dim=1) - last.means.norm(dim=1)).abs().max() < 0.02
    assert (now.nearest(rows[classes == 3], 1) == 3).all()
    assert now.weights.tolist() == pytest.approx([0.25] * 4, abs=0.01)


def test_a_component_without_rows_stays_finite() -> None:
    rows, _ = blobs(3, 8, 20, 0.2)
    far = torch.cat([some_rows(rows, 3), 100 * torch.ones(1, 8, dtype=torch.float64)])
    fitted = SphericalMixture.fit(rows, 4, start=far)
    assert all(torch.isfinite(part).all() for part in (fitted.means, fitted.variances, fitted.weights))
    assert torch.equal(fitted.means[3], far[3].float()) and fitted.weights[3] < 1e-6
    assert torch.isfinite(fitted.log_responsibilities(rows)[:, :3]).all()
    assert not (fitted.nearest(rows, 1) == 3).any()


# queries


def test_distinct_images_get_distinct_prompt_sets() -> None:
    """PromptCCD's collapse: fitted on unit features and queried at norm 45, it gave all images the same prompts."""
    rows, classes = blobs(70, 384, 50, 1.0, uneven=0.2)
    centres = torch.stack([rows[classes == c].mean(0) for c in range(70)])
    fitted = SphericalMixture.fit(rows.float(), 70, start=centres)

    def sets(top: Tensor) -> int:
        return len({tuple(sorted(row)) for row in top.tolist()})

    plain = sets(fitted.nearest(rows.float(), 5))
    assert plain > 1000
    assert sets(fitted.nearest(45 * rows.float(), 5)) == pytest.approx(plain, abs=2)  # two may tie in float32
    unnormalised = fitted.log_joint(45 * rows)  # what a query without `unit` would rank by
    assert sets(unnormalised.topk(5, dim=1).indices) < plain / 20


# replay


def test_samples_have_the_mean_and_variance_of_their_component() -> None:
    means = torch.tensor([[0.5, 0.0, 0.0, 0.1], [0.0, -0.4, 0.2, 0.0]])
    pool = SphericalMixture(means, torch.tensor([0.04, 0.09]), torch.tensor([0.999, 0.001]))
    draws = pool.sample(20_000, torch.Generator().manual_seed(0))  # as many from the component of weight 0.001
    torch.testing.assert_close(draws.mean(1), means, atol=0.01, rtol=0)
    torch.testing.assert_close(draws.var(1), torch.tensor([[0.04] * 4, [0.09] * 4]), rtol=0.05, atol=0)
    assert torch.equal(draws, pool.sample(20_000, torch.Generator().manual_seed(0)))


def test_samples_are_as_long_as_features() -> None:
    """E|x|^2 = |m|^2 + D v = 1 for the variance of the rows; drawn with the floor it would be more than 2 here."""
    rows, _ = blobs(5, 384, 60, 0.5)
    fitted = SphericalMixture.fit(rows, 5, regularisation=4e-3)
    floored = fitted.means.square().sum(1) + 384 * fitted.variances
    assert floored.min() > 2
    lengths = fitted.sample(50, torch.Generator().manual_seed(0)).square().sum(-1)
    torch.testing.assert_close(lengths.mean(1), torch.ones(5), atol=0.02, rtol=0)


def test_errors_say_the_rule_and_the_value() -> None:
    rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="to 10, .* not 11"):
        SphericalMixture.fit(rows, 11)
    rows[6, 1] = math.nan
    with pytest.raises(ValueError, match="features must be finite.*row 6"):
        SphericalMixture.fit(rows, 2)


# Growing: the evidence against products of predictive densities, and the moves on blobs whose number is known


def orthogonal(classes: int, per_class: int = 30, dim: int = 24, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Unit rows around orthogonal directions, and their classes."""
    noises = torch.randn(classes, per_class, dim, generator=torch.Generator().manual_seed(0)) * noise / math.sqrt(dim)
    rows = F.normalize((torch.eye(dim)[:classes, None] + noises).flatten(0, 1), dim=1)
    return rows, torch.arange(classes).repeat_interleave(per_class)


def around(means: Tensor) -> SphericalMixture:
    count = len(means)
    return SphericalMixture(means, torch.full((count,), 1e-2), torch.full((count,), 1 / count))


def predictive_evidence(rows: Tensor, variance: float) -> float:
    """log p(rows) = sum of log p(row | rows before it): multivariate t densities, updated one row at a time."""
    from scipy.stats import multivariate_t

    dim = rows.shape[1]
    kappa, shape, scale, mean = KAPPA, dim / 2, dim / 2 * variance, torch.zeros(dim, dtype=torch.float64)
    total = 0.0
    for x in rows:
        spread = scale / shape * (1 + 1 / kappa)
        total += multivariate_t(mean.numpy(), spread * torch.eye(dim).numpy(), df=2 * shape).logpdf(x.numpy())
        scale += 0.5 * kappa / (kappa + 1) * float((x - mean).square().sum())
        mean = (kappa * mean + x) / (kappa + 1)
        kappa, shape = kappa + 1, shape + dim / 2
    return total


@pytest.mark.parametrize(("count", "dim"), [(1, 1), (4, 1), (1, 5), (7, 3)])
def test_the_evidence_is_the_product_of_predictive_densities(count: int, dim: int) -> None:
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.3
    groups = Groups.of(rows, torch.zeros(count, dtype=torch.int64), 1)
    found = Prior(dim, 0.7).evidence(groups.counts, groups.squares, groups.sums.square().sum(1))
    assert float(found) == pytest.approx(predictive_evidence(rows, 0.7), rel=1e-8)


@pytest.mark.parametrize("start", [1, 5, 20])
def test_growing_finds_the_number_of_orthogonal(start: int) -> None:
    rows, classes = orthogonal(7)
    grown = grow(45 * rows, SphericalMixture.fit(rows, start))
    assert grown.components == 7
    found = grown.nearest(rows, 1)[:, 0]
    assert len({(int(c), int(f)) for c, f in zip(classes, found, strict=True)}) == 7


def test_known_components_keep_their_ids_while_new_ones_are_found() -> None:
    rows, classes = orthogonal(9)
    order = [3, 0, 2, 1]
    known = torch.stack([rows[classes == c].mean(0) for c in order])
    grown = grow(rows, SphericalMixture.fit(rows, 5, start=known), known=4)
    assert grown.components == 9
    for component, c in enumerate(order):
        assert (grown.nearest(rows[classes == c], 1) == component).all()


def test_known_components_are_never_merged_with_each_other_but_take_in_unknown_ones() -> None:
    rows, classes = orthogonal(2)
    both, one = around(rows.mean(0, keepdim=True)), rows[classes == 0]
    assert grow(rows, both, known=1).components == 1  # nor is one split
    assert grow(rows, both, known=0).components == 2
    means = torch.stack([one[:15].mean(0), one[15:].mean(0), rows[classes == 1].mean(0)])
    assert grow(rows, around(means), known=2).components == 3
    absorbed = grow(rows, around(means), known=1)
    assert absorbed.components == 2 and (absorbed.nearest(one, 1) == 0).all()
    assert grow(rows, around(means), known=0).components == 2


def test_a_known_component_without_rows_stays_and_an_unknown_one_goes() -> None:
    rows, classes = orthogonal(3)
    means = torch.stack(
        [-torch.eye(24)[20], rows[classes == 0].mean(0), rows[classes == 1].mean(0), -torch.eye(24)[21]]
    )
    grown = grow(rows[classes < 2], around(means), known=1)
    assert grown.components == 3
    torch.testing.assert_close(grown.means[0], means[0], atol=1e-6, rtol=0)

"""The evidence against products of predictive densities, and the moves on blobs whose number is known."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.ccd.mixture import KAPPA, Groups, Prior, SphericalMixture, grow


def blobs(classes: int, per_class: int = 30, dim: int = 24, noise: float = 0.3) -> tuple[Tensor, Tensor]:
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
def test_growing_finds_the_number_of_blobs(start: int) -> None:
    rows, classes = blobs(7)
    grown = grow(45 * rows, SphericalMixture.fit(rows, start))
    assert grown.components == 7
    found = grown.nearest(rows, 1)[:, 0]
    assert len({(int(c), int(f)) for c, f in zip(classes, found, strict=True)}) == 7


def test_known_components_keep_their_ids_while_new_ones_are_found() -> None:
    rows, classes = blobs(9)
    order = [3, 0, 2, 1]
    known = torch.stack([rows[classes == c].mean(0) for c in order])
    grown = grow(rows, SphericalMixture.fit(rows, 5, start=known), known=4)
    assert grown.components == 9
    for component, c in enumerate(order):
        assert (grown.nearest(rows[classes == c], 1) == component).all()


def test_known_components_are_never_merged_with_each_other_but_take_in_unknown_ones() -> None:
    rows, classes = blobs(2)
    both, one = around(rows.mean(0, keepdim=True)), rows[classes == 0]
    assert grow(rows, both, known=1).components == 1  # nor is one split
    assert grow(rows, both, known=0).components == 2
    means = torch.stack([one[:15].mean(0), one[15:].mean(0), rows[classes == 1].mean(0)])
    assert grow(rows, around(means), known=2).components == 3
    absorbed = grow(rows, around(means), known=1)
    assert absorbed.components == 2 and (absorbed.nearest(one, 1) == 0).all()
    assert grow(rows, around(means), known=0).components == 2


def test_a_known_component_without_rows_stays_and_an_unknown_one_goes() -> None:
    rows, classes = blobs(3)
    means = torch.stack(
        [-torch.eye(24)[20], rows[classes == 0].mean(0), rows[classes == 1].mean(0), -torch.eye(24)[21]]
    )
    grown = grow(rows[classes < 2], around(means), known=1)
    assert grown.components == 3
    torch.testing.assert_close(grown.means[0], means[0], atol=1e-6, rtol=0)

"""CORAL and MMD against loops over entries and pairs, DANN and CDANN against a network without reversal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.methods.alignment import (
    domain_features,
    domain_network,
    kernel_distance,
    moment_distance,
    positions,
)
from patchgen.model.losses import pseudo_labels


def points(rows: int, seed: int, dim: int = 3) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_by_hand(one: Tensor, other: Tensor) -> float:
    def moments(x: list[list[float]]) -> tuple[list[float], list[list[float]]]:
        n, dim = len(x), len(x[0])
        mean = [sum(row[j] for row in x) / n for j in range(dim)]
        cov = [
            [sum((row[i] - mean[i]) * (row[j] - mean[j]) for row in x) / (n - 1) for j in range(dim)]
            for i in range(dim)
        ]
        return mean, cov

    (m, c), (m2, c2), dim = moments(one.tolist()), moments(other.tolist()), one.shape[1]
    means = sum((a - b) ** 2 for a, b in zip(m, m2, strict=True)) / dim
    return means + sum((c[i][j] - c2[i][j]) ** 2 for i in range(dim) for j in range(dim)) / dim**2


def kernels_by_hand(one: Tensor, other: Tensor) -> float:
    def mean(a: list[list[float]], b: list[list[float]]) -> float:
        apart = [sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) for x in a for y in b]
        return sum(math.exp(-gamma * d) for d in apart for gamma in (1e-3, 1e-2, 1e-1, 1, 10, 100, 1e3)) / len(apart)

    a, b = one.tolist(), other.tolist()
    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


CASES = [(moment_distance, moments_by_hand), (kernel_distance, kernels_by_hand)]


@pytest.mark.parametrize(("distance", "by_hand"), CASES)
def test_distances_equal_loops(distance: Callable[..., Tensor], by_hand: Callable[..., float]) -> None:
    one, other = points(5, 0), 0.5 * points(4, 1) + 1
    assert float(distance(one, other)) == pytest.approx(by_hand(one, other), rel=1e-9)
    assert float(distance(one, other)) == pytest.approx(float(distance(other, one)), rel=1e-9)


def test_coral_of_shifted_sets_is_the_shift_squared() -> None:
    x, shift = points(6, 0), torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    assert float(moment_distance(x, x + shift)) == pytest.approx((9 + 1 + 0.25) / 3)
    assert float(moment_distance(torch.zeros(1, 3), torch.ones(1, 3))) == 1  # no covariance of one sample


def test_three_domains_give_the_mean_of_three_pairs(scene: Callable[..., Any]) -> None:
    s = scene("coral", hparams={"coral": 0.3})
    domain = torch.tensor([5, 1, 9, 1, 9, 5])
    batch = type(s.batch)(s.batch.image, s.batch.label, domain, s.batch.index)
    out = s.forward()
    groups = domain_features(out, batch)
    assert [g.shape[0] for g in groups] == [2, 2, 2] and torch.equal(groups[0], out.features[[1, 3]])
    pairs = [moments_by_hand(a.detach(), b.detach()) for a, b in itertools.combinations(groups, 2)]
    assert float(s.method.losses(out, batch)["L_coral"].detach()) == pytest.approx(0.3 * sum(pairs) / 3, rel=1e-3)


def test_one_domain_is_compared_with_nothing(scene: Callable[..., Any]) -> None:
    s = scene("mmd")
    alone = type(s.batch)(s.batch.image, s.batch.label, torch.zeros_like(s.batch.domain), s.batch.index)
    assert float(s.method.losses(s.forward(), alone)["L_mmd"].detach()) == 0


# By a discriminator

PLACE = torch.tensor([0, 0, 0, 1, 1, 1])  # of the scene's domains among the sources


def test_the_network_and_its_targets() -> None:
    assert positions(torch.tensor([7, 3, 3, 5]), (3, 5, 7)).tolist() == [2, 0, 0, 1]
    layers = [tuple(p.shape) for p in domain_network(10, 4).parameters()]
    assert layers == [(256, 10), (256,), (256, 256), (256,), (4, 256), (4,)]


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_the_network_gets_the_gradient_and_the_features_its_opposite(
    name: str, penalty: float, scene: Callable[..., Any]
) -> None:
    s = scene(name, sources=(0, 2), hparams={"dann": 0.3, "penalty": penalty})
    x = s.forward().features.detach().requires_grad_()
    out = s.forward()._replace(features=x)
    found = s.method.losses(out, s.batch)
    domain = found["L_dann"] + found["L_slope"] if penalty else found["L_dann"]
    own = list(s.method.parameters())
    got = torch.autograd.grad(domain, [x, *own], allow_unused=True)

    # the same without any reversal
    plain, target = x.detach().clone().requires_grad_(), pseudo_labels(out.logits, s.batch.label)
    read = plain + s.method.class_vectors(target) if name == "cdann" else plain * 1
    each = F.cross_entropy(s.method.discriminator(read), PLACE, reduction="none")
    share = [1 / sum(int(t == other) for other in target) / len(set(target.tolist())) for t in target]
    loss = (each * torch.tensor(share)).sum() if name == "cdann" else each.sum() / 6
    if penalty:
        [slope] = torch.autograd.grad(each.sum(), read, create_graph=True)
        loss = loss + penalty * sum(row @ row for row in slope) / 6
    wanted = torch.autograd.grad(loss, [plain, *own], allow_unused=True)

    torch.testing.assert_close(domain, loss)
    torch.testing.assert_close(got[0], -0.3 * wanted[0])
    assert wanted[0].abs().max() > 0
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)

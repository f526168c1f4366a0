"""GMDG and its variants without labels: penalties against the pseudo-inverse, autograd and loops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.methods.gmdg import (
    explained_covariance,
    mean_of_domains,
    moment_distance,
    scaled_penalty,
)


def naive_penalty(features: Tensor, labels: Tensor) -> Tensor:
    """As it is written, with the D x D pseudo-inverse."""
    x, y = features / features.norm(), labels / labels.norm()
    x, y = x - x.mean(0), y - y.mean(0)
    n = len(x)
    explained = (x.T @ y / n) @ torch.linalg.pinv(y.T @ y / n) @ (y.T @ x / n)
    return explained.square().mean()


def random_pair(samples: int, dim: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(samples + dim)
    x, y = (torch.randn(samples, dim, generator=g, dtype=torch.float64) for _ in range(2))
    if rank is not None:
        y = torch.randn(samples, rank, generator=g, dtype=torch.float64) @ y[:rank]
    return x, y


@pytest.mark.parametrize(
    ("samples", "dim", "rank"), [(6, 20, None), (20, 6, None), (8, 8, None), (12, 30, 3), (30, 12, 2)]
)
def test_the_penalty_is_that_of_the_pseudo_inverse(samples: int, dim: int, rank: int | None) -> None:
    x, y = random_pair(samples, dim, rank)
    slopes = []
    for penalty in (explained_covariance, naive_penalty):
        leaf = x.clone().requires_grad_()
        value = penalty(leaf, y)
        slopes.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-6, atol=1e-12)


def test_the_scaled_penalty_is_as_steep_as_told() -> None:
    x, y = random_pair(6, 20)
    leaf = x.clone().requires_grad_()
    naive = naive_penalty(leaf, y)
    (slope,) = torch.autograd.grad(naive, leaf)
    scale = 0.3 / slope.abs().max()
    found = scaled_penalty(lambda z: explained_covariance(z, y), leaf, torch.tensor(0.3))
    torch.testing.assert_close(found.detach(), (scale * naive).detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(*torch.autograd.grad(found, leaf), scale * slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("domain", [(3, 3, 0, 0), (3, 3, 3, 0), (1, 1, 1, 1)])
def test_domains_count_alike_whatever_their_size(domain: tuple[int, ...]) -> None:
    values = torch.randn(4, 3)
    means = [torch.stack([v for v, d in zip(values, domain, strict=True) if d == k]).mean(0) for k in set(domain)]
    torch.testing.assert_close(mean_of_domains(values, torch.tensor(domain)), torch.stack(means).mean(0))


def terms(s: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)  # of the embedding's dropout
    found: dict[str, Tensor] = s.method.losses(s.forward(), s.batch)
    return found


@pytest.mark.parametrize("name", ["gmdg", "patchgen+gmdg"])
def test_terms_by_hand(name: str, scene: Callable[..., Any]) -> None:
    weights = {"miro": 0.3, "shift": 0.2, "domain": 0.5}
    s = scene(name, hparams=weights)
    s.move()
    found, out = terms(s), s.forward()
    assert [term for term in found if term.startswith("L_")][-4:] == ["L_miro", "L_label", "L_shift", "L_domain"]
    target = torch.where(s.batch.label < 0, out.logits.argmax(1), s.batch.label)
    torch.manual_seed(7)
    y, labelled = s.method.embedding(target), s.batch.label >= 0
    label_loss = F.cross_entropy(s.model.head(y)[labelled], s.batch.label[labelled])
    torch.testing.assert_close(found["L_label"], label_loss)

    main = F.cross_entropy(out.logits[labelled], s.batch.label[labelled])
    (steep,) = torch.autograd.grad(main, out.features, retain_graph=True)
    naive = naive_penalty(out.features.double(), y.detach().double())
    (flat,) = torch.autograd.grad(naive, out.features, retain_graph=True)
    wanted = 0.2 * naive * steep.abs().max() / flat.abs().max()
    torch.testing.assert_close(found["L_shift"].detach().double(), wanted.detach(), rtol=1e-3, atol=0)

    pair = torch.cat([out.features, y], 1).detach().double()
    center = (pair[:3].mean(0) + pair[3:].mean(0)) / 2
    parts = [((row - center) ** 2 / 0.1 + math.log(0.1)).mean() / 2 for row in pair]
    assert float(found["L_domain"].detach()) == pytest.approx(0.5 * float(torch.stack(parts).mean()), rel=1e-4)


def test_weights_of_zero_cost_nothing(scene: Callable[..., Any]) -> None:
    s = scene("gmdg", hparams={"shift": 0.0, "domain": 0.0})
    assert list(terms(s)) == ["main", "L_miro"]
    assert {name for name, _ in s.method.named_parameters()} == {"variances.0.bias", "variances.1.bias"}
    s = scene("gmdg", tune="head", hparams={"miro": 0.0, "domain": 0.0})
    assert list(terms(s)) == ["main", "L_label", "L_shift"]


def test_the_domain_term_moves_nothing_but_its_variance(scene: Callable[..., Any]) -> None:
    """m is the mean of the very c that the term compares with it: no pull is left, only rounding."""
    s = scene("gmdg")
    s.move()
    strongest = []
    for term in ("L_domain", "L_shift"):
        own = s.reached(terms(s)[term])[1]
        assert own == ({"variance.bias"} if term == "L_domain" else set())
        trained = [p.grad for p in s.model.backbone.parameters() if p.grad is not None]
        strongest.append(max(float(gradient.abs().max()) for gradient in trained))
    assert strongest[0] < 1e-5 * strongest[1]


# Without labels


def test_it_is_the_distance_of_the_matrices() -> None:
    x, domain = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 2, 2, 2, 5, 5])
    unit = x / x.norm()
    moments = [unit[domain == e].T @ unit[domain == e] / int((domain == e).sum()) for e in (0, 2, 5)]
    mean = sum(moments) / 3
    wanted = sum(float(((c - mean) ** 2).mean()) for c in moments) / 3
    assert float(moment_distance(x, domain)) == pytest.approx(wanted, rel=1e-4)


def test_the_term_is_as_steep_as_the_cross_entropy(scene: Callable[..., Any]) -> None:
    s = scene("domain-moments", sources=(0, 2), hparams={"moments": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    main, term = (
        torch.autograd.grad(found[name], out.features, retain_graph=True)[0] for name in ("main", "L_moments")
    )
    assert float(term.abs().max()) == pytest.approx(0.5 * float(main.abs().max()), rel=1e-4)


def test_the_gaussian_trains_its_variance_alone(scene: Callable[..., Any]) -> None:
    s = scene("domain-gaussian", sources=(0, 2))
    out = s.forward()
    term = s.method.losses(out, s.batch)["L_gaussian"]
    (slope,) = torch.autograd.grad(term, out.features, retain_graph=True)
    assert float(slope.abs().max()) < 1e-6
    assert s.reached(term)[1] == {"spread.bias"}
    x = out.features.detach()
    m = (x[:3].mean(0) + x[3:].mean(0)) / 2
    v = 0.1
    wanted = 0.1 * float(((x - m) ** 2 / v).mean() + torch.tensor(v).log()) / 2
    assert float(term.detach()) == pytest.approx(wanted, rel=1e-4)

"""GMDG: its covariance penalty against the pseudo-inverse, its scale against autograd, its Gaussian against loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.methods.gmdg import (
    LabelEmbedding,
    cross_entropy_slope,
    explained_covariance,
    mean_of_domains,
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


def test_labels_that_say_nothing_explain_nothing() -> None:
    x, y = random_pair(8, 5)
    assert float(explained_covariance(x, torch.zeros_like(y))) == 0
    assert float(scaled_penalty(lambda z: explained_covariance(z, torch.zeros_like(y)), x, torch.tensor(1.0))) == 0


def test_the_slope_of_cross_entropy_is_autograds() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=g).requires_grad_()
    weight, label = torch.randn(3, 4, generator=g), torch.tensor([0, -1, 2, 1, -1])
    loss = F.cross_entropy(x @ weight.T, label, ignore_index=-1)
    torch.testing.assert_close(cross_entropy_slope(x @ weight.T, label, weight), *torch.autograd.grad(loss, x))
    assert not cross_entropy_slope(x @ weight.T, torch.full((5,), -1), weight).any()


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


def test_the_label_embedding() -> None:
    torch.manual_seed(0)
    embedding = LabelEmbedding(8)
    assert [tuple(p.shape) for p in embedding.parameters()] == [(4, 8), (4,), (8, 4), (8,), (8, 8), (8,)]
    one, other = embedding(torch.tensor([2, 2]))
    assert not torch.equal(one, other)  # dropout is always on
    embedding.eval()
    x = torch.full((8,), 2.0)
    first, second, third = (layer for layer in embedding.layers if isinstance(layer, torch.nn.Linear))
    torch.testing.assert_close(embedding(torch.tensor([2]))[0], third(second(first(x).relu()).relu()))


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


def test_gradients_reach_exactly_the_right_parameters(scene: Callable[..., Any]) -> None:
    s = scene("gmdg")
    s.move()
    backbone = {n for n, p in s.model.backbone.named_parameters(prefix="backbone") if p.requires_grad}
    embedding = {f"embedding.layers.{i}.{kind}" for i in (0, 3, 6) for kind in ("weight", "bias")}
    assert s.reached(terms(s)["L_label"]) == (set(), embedding)
    assert s.reached(terms(s)["L_shift"]) == (backbone, set())
    model, own = s.reached(terms(s)["L_domain"])
    assert own == {"variance.bias"}
    # m is the mean of the very c that the term compares with it: no pull is left, only rounding
    strongest = max(float(s.model.get_parameter(name).grad.abs().max()) for name in backbone)
    s.reached(terms(s)["L_shift"])
    assert strongest < 1e-5 * max(float(s.model.get_parameter(name).grad.abs().max()) for name in backbone)
    assert set(s.method.state_dict()) == embedding | {"variance.bias", "variances.0.bias", "variances.1.bias"}
    assert [rate for _, rate in s.method.rates()] == pytest.approx([5e-4] * 3)


def test_domains_of_unequal_size_are_no_error(scene: Callable[..., Any]) -> None:
    s = scene("gmdg")
    s.batch.domain[:] = torch.tensor([0, 0, 0, 0, 0, 2])
    assert all(value.isfinite() for value in terms(s).values())


def test_weights_of_zero_cost_nothing(scene: Callable[..., Any]) -> None:
    s = scene("gmdg", hparams={"shift": 0.0, "domain": 0.0})
    assert list(terms(s)) == ["main", "L_miro"]
    assert {name for name, _ in s.method.named_parameters()} == {"variances.0.bias", "variances.1.bias"}
    s = scene("gmdg", tune="head", hparams={"miro": 0.0, "domain": 0.0})
    assert list(terms(s)) == ["main", "L_label", "L_shift"]

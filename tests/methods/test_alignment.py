"""CORAL and MMD over pairs of domains, DANN and CDANN against a network without reversal, and mDSDI."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.alignment import TwoPartHead, covariance, moment_distance, positions, risk_after_a_step
from patchgen.model.losses import pseudo_labels


def points(rows: int, seed: int, dim: int = 3) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_coral_of_shifted_sets_is_the_shift_squared() -> None:
    x, shift = points(6, 0), torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    assert float(moment_distance(x, x + shift)) == pytest.approx((9 + 1 + 0.25) / 3)
    assert float(moment_distance(torch.zeros(1, 3), torch.ones(1, 3))) == 1  # no covariance of one sample


def test_three_domains_give_the_mean_of_three_pairs(scene: Callable[..., Any]) -> None:
    s = scene("coral", hparams={"coral": 0.3})
    domain = torch.tensor([5, 1, 9, 1, 9, 5])
    batch = type(s.batch)(s.batch.image, s.batch.label, domain, s.batch.index)
    out = s.forward()
    domains = [out.features[rows] for rows in ([1, 3], [0, 5], [2, 4])]
    pairs = [moment_distance(a, b) for a, b in itertools.combinations(domains, 2)]
    torch.testing.assert_close(s.method.losses(out, batch)["L_coral"], 0.3 * sum(pairs) / 3)


def test_one_domain_is_compared_with_nothing(scene: Callable[..., Any]) -> None:
    s = scene("mmd")
    alone = type(s.batch)(s.batch.image, s.batch.label, torch.zeros_like(s.batch.domain), s.batch.index)
    assert float(s.method.losses(s.forward(), alone)["L_mmd"].detach()) == 0


# By a discriminator

PLACE = torch.tensor([0, 0, 0, 1, 1, 1])  # of the scene's domains among the sources


def test_targets_are_places_among_the_sources() -> None:
    assert positions(torch.tensor([7, 3, 3, 5]), (3, 5, 7)).tolist() == [2, 0, 0, 1]


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


# By two parts of the features


def test_the_head_reads_both_parts() -> None:
    torch.manual_seed(0)
    head, x = TwoPartHead(5, 3), points(4, 0, 5).float()
    with torch.no_grad():
        head.bias += torch.tensor([1.0, -2.0, 0.5])
    both = torch.cat([x @ head.invariant.weight.T, x @ head.specific.weight.T], 1)
    torch.testing.assert_close(head(x), both @ head.joint.weight.T + head.bias)
    torch.testing.assert_close(head(x), F.linear(x, head.weight, head.bias))
    assert (head.in_features, head.out_features, head.weight.shape) == (5, 3, (3, 5))
    torch.testing.assert_close(head.invariant(x).norm(dim=1), x.norm(dim=1))


def test_the_covariance_is_torchs_and_zero_for_unrelated_columns() -> None:
    a, b = points(6, 1, 2), points(6, 2, 3)
    torch.testing.assert_close(covariance(a, b), torch.cat([a, b], 1).T.cov()[:2, 2:])
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert float(covariance(signs[:, :1], signs[:, 1:])) == 0


def meta_by_hand(head: TwoPartHead, x: Tensor, label: Tensor, rate: float) -> tuple[float, dict[str, Tensor]]:
    """Steps on a copy, put back: the mean risk, and the mean of the gradients where it was measured."""
    learn = {name: p for name, p in head.named_parameters() if name != "invariant.weight"}
    start = {name: p.detach().clone() for name, p in learn.items()}
    total, gradients = 0.0, {name: torch.zeros_like(p) for name, p in learn.items()}
    for held_out in ([0, 1, 2], [3, 4, 5]):
        rest = [i for i in range(6) if i not in held_out]
        inner = F.cross_entropy(head(x[rest]), label[rest], ignore_index=-1)
        slopes = torch.autograd.grad(inner, list(learn.values()))
        with torch.no_grad():
            for p, slope in zip(learn.values(), slopes, strict=True):
                p -= rate * slope
        outer = F.cross_entropy(head(x[held_out]), label[held_out], ignore_index=-1)
        for name, slope in zip(learn, torch.autograd.grad(outer, list(learn.values())), strict=True):
            gradients[name] += slope / 2
        total += float(outer.detach()) / 2
        with torch.no_grad():
            for name, p in learn.items():
                p.copy_(start[name])
    return total, gradients


def test_the_meta_term_and_its_gradient_equal_steps_on_a_copy() -> None:
    torch.manual_seed(0)
    head, x, label = TwoPartHead(5, 3), points(6, 3, 5).float(), torch.tensor([0, 2, 2, 1, 0, -1])
    batch = Batch(torch.empty(0), label, torch.tensor([4, 4, 4, 7, 7, 7]), torch.arange(6))
    value, gradients = meta_by_hand(head, x, label, 0.5)
    found = risk_after_a_step(head, x, batch, 0.5)
    found.backward()
    assert float(found.detach()) == pytest.approx(value, rel=1e-5)
    assert abs(value - float(risk_after_a_step(head, x, batch, 0.0).detach())) > 1e-2
    for name, wanted in gradients.items():
        torch.testing.assert_close(head.get_parameter(name).grad, wanted, rtol=1e-4, atol=1e-6)
    assert head.invariant.weight.grad is None


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_terms(first: str, scene: Callable[..., Any]) -> None:
    hparams = {"invariant": 0.5, "specific": 2.0, "covariance": 3.0, "meta": 4.0}
    s = scene(f"{first}mdsdi", sources=(0, 2), lr=0.1, hparams=hparams)
    out = s.forward()
    found = s.method.losses(out, s.batch)
    assert list(found)[-4:] == ["L_invariant", "L_specific", "L_covariance", "L_meta"]
    x, head = out.features, s.model.head
    i, q = x @ head.invariant.weight.T, x @ head.specific.weight.T
    torch.testing.assert_close(found["L_invariant"], F.cross_entropy(s.method.adversary(i), PLACE))
    torch.testing.assert_close(found["L_specific"], 2 * F.cross_entropy(s.method.recogniser(q), PLACE))
    torch.testing.assert_close(found["L_covariance"], 3 * covariance(i, q).square().mean())
    value, _ = meta_by_hand(head, x.detach(), s.batch.label, 0.1)
    assert float(found["L_meta"].detach()) == pytest.approx(4 * value, rel=1e-4)

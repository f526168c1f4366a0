"""DANN and CDANN: the domain loss by loops, one sign of its gradient for the network and the other for the features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.methods.adversarial import domain_network, mean_of_classes, positions, reverse_gradient
from patchgen.model.losses import pseudo_labels

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
PLACE = [0, 0, 0, 1, 1, 1]  # of the scene's domains among the sources


def with_sources(s: Any) -> Any:
    s.method.sources = (0, 2)
    torch.manual_seed(0)
    s.method.setup(s.model)
    return s


def nll_by_hand(logits: Tensor) -> list[float]:
    rows = logits.detach().double().tolist()
    return [math.log(sum(map(math.exp, row))) - row[place] for row, place in zip(rows, PLACE, strict=True)]


def test_ids_become_places() -> None:
    assert positions(torch.tensor([7, 3, 3, 5]), (3, 5, 7)).tolist() == [2, 0, 0, 1]
    assert positions(torch.tensor([7, 3]), (7, 3)).tolist() == [0, 1]


def test_the_network() -> None:
    layers = [tuple(p.shape) for p in domain_network(10, 4).parameters()]
    assert layers == [(256, 10), (256,), (256, 256), (256,), (4, 256), (4,)]


def test_reversal() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    y = reverse_gradient(x, 0.4)
    assert torch.equal(y, x)
    (y**2).sum().backward()
    torch.testing.assert_close(x.grad, -0.4 * 2 * x.detach())


def test_classes_count_the_same() -> None:
    each, target = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 0, 0, 3])
    assert float(mean_of_classes(each, target, 5)) == (2 + 10) / 2


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_dann_by_hand(first: str, scene: Callable[..., Any]) -> None:
    s = with_sources(scene(f"{first}dann", hparams={"dann": 0.3}))
    out = s.forward()
    found = s.method.losses(out, s.batch)
    assert list(found)[-1] == "L_dann" and ("L_conf" in found) == bool(first)
    each = nll_by_hand(s.method.discriminator(out.features))
    assert float(found["L_dann"].detach()) == pytest.approx(sum(each) / 6, rel=1e-5)


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_the_network_gets_the_gradient_and_the_features_its_opposite(
    name: str, penalty: float, scene: Callable[..., Any]
) -> None:
    s = with_sources(scene(name, hparams={"dann": 0.3, "penalty": penalty}))
    x = s.forward().features.detach().requires_grad_()
    out = s.forward()._replace(features=x)
    found = s.method.losses(out, s.batch)
    domain = found["L_dann"] + found["L_slope"] if penalty else found["L_dann"]
    own = list(s.method.parameters())
    got = torch.autograd.grad(domain, [x, *own], allow_unused=True)

    # the same without any reversal
    plain, target = x.detach().clone().requires_grad_(), pseudo_labels(out.logits, s.batch.label)
    read = plain + s.method.class_vectors(target) if name == "cdann" else plain * 1
    each = F.cross_entropy(s.method.discriminator(read), torch.tensor(PLACE), reduction="none")
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


def test_cdann_by_hand(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("cdann"))
    out = s.forward()
    target = [0, 2, 2, 1, 0, int(out.logits[5].argmax())]
    each = nll_by_hand(s.method.discriminator(out.features + s.method.class_vectors.weight[target]))
    means = [sum(each[i] for i in range(6) if target[i] == c) / target.count(c) for c in range(3)]
    found = s.method.losses(out, s.batch)
    assert list(found) == ["main", "L_dann"]
    assert float(found["L_dann"].detach()) == pytest.approx(sum(means) / 3, rel=1e-5)


@pytest.mark.parametrize("name", ["dann", "cdann", "patchgen+dann", "patchgen+cdann"])
def test_what_the_term_reaches(name: str, scene: Callable[..., Any]) -> None:
    s = with_sources(scene(name))
    model, own = s.reached(s.method.losses(s.forward(), s.batch)["L_dann"])
    assert not any(tensor.startswith("head.") for tensor in model)
    assert any(tensor.startswith("backbone.") for tensor in model)
    assert own == {tensor for tensor, _ in s.method.named_parameters()} == set(s.method.state_dict())
    learning = {id(p) for module, _ in s.method.rates() for p in module.parameters()}
    assert learning == {id(p) for p in s.method.parameters()}


def test_the_networks_rate(scene: Callable[..., Any]) -> None:
    s = with_sources(scene("cdann", lr=0.01, hparams={"lr_mult": 3.0}))
    assert [(module, pytest.approx(0.03)) for module in (s.method.discriminator, s.method.class_vectors)] == [
        *s.method.rates()
    ]

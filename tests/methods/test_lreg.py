"""L-Reg, PIM and entropies against loops; SelfReg: orders within classes, the projector, and the factor."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Beta

from patchgen.methods import lreg

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-3.0, 0.5, 0.0], [0.2, 0.1, 0.0]])
LABEL = torch.tensor([0, -1, 2, -1])
P = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in LOGITS.tolist()]


def test_each_class_on_a_dimension_of_its_own_is_best() -> None:
    assert float(lreg.logical_regularisation(1e3 * torch.eye(4), torch.eye(4))) == pytest.approx(-math.log(4), abs=1e-5)


def test_orthogonality_by_hand() -> None:
    features = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert float(lreg.orthogonality(features)) == pytest.approx(4 * 0.5**2 / 4)  # [[1.5, .5], [.5, 1.5]] - 1
    assert float(lreg.orthogonality(torch.eye(3))) == 0


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p)


def test_entropies_by_hand() -> None:
    mean = [sum(row[c] for row in P) / 4 for c in range(3)]
    assert float(lreg.marginal_entropy(LOGITS)) == pytest.approx(entropy(mean), abs=1e-6)
    wanted = (entropy(P[1]) + entropy(P[3])) / 2
    assert float(lreg.conditional_entropy(LOGITS, LABEL < 0)) == pytest.approx(wanted, abs=1e-6)


def test_extreme_logits_have_finite_gradients() -> None:
    logits, features = torch.tensor([[1e4, 0.0, 0.0], [1e4, 0.0, -1e4]]).requires_grad_(), torch.randn(2, 6)
    some = torch.tensor([True, True])
    total = (
        lreg.marginal_entropy(logits)
        + lreg.conditional_entropy(logits, some)
        + lreg.logical_regularisation(logits, features)
    )
    total.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_without_unlabelled_samples_the_terms_are_zero() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    logits = LOGITS.clone().requires_grad_()
    for value in (lreg.conditional_entropy(logits, none), lreg.weighted_pseudo_loss(logits, none, torch.ones(4))):
        assert float(value.detach()) == 0 and value.requires_grad


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_terms_are_those_of_the_output(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}pim-lreg", hparams={"confidence": 0.4})
    out, rows = s.forward(), s.batch.label < 0
    found = s.method.losses(out, s.batch)
    error = s.method.predictor(out.logits.detach()).detach()
    assert (error > 0).any()
    torch.testing.assert_close(found["L_pseudo"], 0.4 * lreg.weighted_pseudo_loss(out.logits, rows, 1 - error.mean(1)))
    torch.testing.assert_close(
        found["L_error"].detach(), lreg.prediction_loss(error, out.logits, s.batch.label).detach()
    )
    found = scene(f"{first}pim", hparams={"pim": 0.3, "marginal": 2.0}).method.losses(out, s.batch)
    torch.testing.assert_close(found["L_pim"], 0.3 * lreg.conditional_entropy(out.logits, rows))
    torch.testing.assert_close(found["L_marginal"], -2 * lreg.marginal_entropy(out.logits))
    found = scene(f"{first}lreg", hparams={"lreg": 0.2, "ortho": 0.5}).method.losses(out, s.batch)
    torch.testing.assert_close(found["L_reg"], 0.2 * lreg.logical_regularisation(out.logits, out.features))
    torch.testing.assert_close(found["L_ortho"], 0.5 * lreg.orthogonality(out.features))


# SelfReg


def test_orders_keep_the_class_and_take_each_image_once() -> None:
    torch.manual_seed(0)
    target = torch.tensor([2, 0, 2, 1, 0, 2, 0, 2])
    seen = set()
    for _ in range(60):
        order = lreg.shuffle_within_classes(target)
        assert torch.equal(target[order], target) and sorted(order.tolist()) == list(range(8))
        seen.add(tuple(order.tolist()))
    assert len(seen) > 40  # of 4! 3! 1! = 144


def test_the_projector() -> None:
    layers = list(lreg.projector(8))
    assert [type(layer) for layer in layers] == [
        nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d,
    ]  # fmt: skip
    assert [m.out_features for m in layers if isinstance(m, nn.Linear)] == [16, 16, 8]
    assert not list(lreg.projector(8).buffers())
    assert lreg.projector(2048)[0].out_features == 2048


@pytest.mark.parametrize("first", ["", "patchgen+"])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_term(first: str, scale: float, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}selfreg")
    out = s.forward()
    out = out._replace(logits=scale * (out.logits + 1 - 2 * nn.functional.one_hot(s.batch.label.clamp(min=0), 3)))
    torch.manual_seed(7)
    found = s.method.losses(out, s.batch)
    target = torch.where(s.batch.label < 0, out.logits.argmax(1), s.batch.label)
    torch.manual_seed(7)
    one, other = lreg.shuffle_within_classes(target), lreg.shuffle_within_classes(target)
    share = float(Beta(0.5, 0.5).sample())
    pull = lreg.contrast(out.logits, out.features, s.method.projector(out.features), one, other, share)
    factor = min(float(found["main"].detach()), 1.0)
    assert (factor == 1.0) == (scale > 1 or float(found["main"].detach()) >= 1)
    torch.testing.assert_close(found["L_selfreg"], factor * pull)
    assert list(found)[-1] == "L_selfreg" and ("L_conf" in found) == bool(first)

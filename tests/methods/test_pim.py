"""PIM, the marginal entropy alone and L-Reg's variant, against loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.methods.lreg import (
    ErrorPredictor,
    conditional_entropy,
    marginal_entropy,
    prediction_loss,
    weighted_pseudo_loss,
)

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-3.0, 0.5, 0.0], [0.2, 0.1, 0.0]])
LABEL = torch.tensor([0, -1, 2, -1])


def probabilities(logits: Tensor = LOGITS) -> list[list[float]]:
    rows = [[math.exp(x) for x in row] for row in logits.tolist()]
    return [[x / sum(row) for x in row] for row in rows]


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p)


def test_entropies_by_hand() -> None:
    p = probabilities()
    mean = [sum(row[c] for row in p) / 4 for c in range(3)]
    assert float(marginal_entropy(LOGITS)) == pytest.approx(entropy(mean), abs=1e-6)
    wanted = (entropy(p[1]) + entropy(p[3])) / 2
    assert float(conditional_entropy(LOGITS, LABEL < 0)) == pytest.approx(wanted, abs=1e-6)


def test_certain_predictions_have_finite_gradients() -> None:
    logits = torch.tensor([[1e4, 0.0, 0.0], [1e4, 0.0, -1e4]]).requires_grad_()
    (marginal_entropy(logits) + conditional_entropy(logits, torch.tensor([True, True]))).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_without_unlabelled_samples_the_terms_are_zero() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    logits = LOGITS.clone().requires_grad_()
    for value in (conditional_entropy(logits, none), weighted_pseudo_loss(logits, none, torch.ones(4))):
        assert float(value.detach()) == 0 and value.requires_grad


def test_the_variant_by_hand() -> None:
    p, weight = probabilities(), torch.tensor([0.9, 0.5, 0.1, 0.25])
    wanted = -(0.5 * math.log(max(p[1])) + 0.25 * math.log(max(p[3]))) / 2
    assert float(weighted_pseudo_loss(LOGITS, LABEL < 0, weight)) == pytest.approx(wanted, abs=1e-6)
    expected = torch.full((4, 3), 0.3)
    miss = [(0.3 - (p[i][c] - (c == int(LABEL[i]))) ** 2) ** 2 for i in (0, 2) for c in range(3)]
    assert float(prediction_loss(expected, LOGITS, LABEL)) == pytest.approx(sum(miss) / 6, abs=1e-6)


def test_the_predictor_stays_between_zero_and_one() -> None:
    torch.manual_seed(0)
    predictor = ErrorPredictor(3)
    out = predictor(50 * torch.randn(200, 3)).detach()
    assert float(out.min()) == 0 and float(out.max()) == 1
    assert [tuple(p.shape) for p in predictor.parameters()] == [(3, 3), (3,), (3, 3), (3,)]


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_pim_and_the_marginal_alone(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}pim", hparams={"pim": 0.3, "marginal": 2.0})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    assert list(found)[-2:] == ["L_marginal", "L_pim"]
    torch.testing.assert_close(found["L_pim"], 0.3 * conditional_entropy(out.logits, s.batch.label < 0))
    torch.testing.assert_close(found["L_marginal"], -2 * marginal_entropy(out.logits))
    alone = scene(f"{first}entropy", hparams={"marginal": 2.0})
    only = alone.method.losses(out, s.batch)
    assert list(found)[:-1] == list(only) and torch.equal(only["L_marginal"], found["L_marginal"])
    model, own = s.reached(found["L_pim"] + found["L_marginal"])
    assert {"head.weight", "head.bias"} <= model and any(n.startswith("backbone.") for n in model) and own == set()


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_variants_gradients_do_not_mix(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}pim-lreg", hparams={"confidence": 0.4})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    error = s.method.predictor(out.logits.detach()).detach()
    assert (error > 0).any()
    wanted = weighted_pseudo_loss(out.logits, s.batch.label < 0, 1 - error.mean(1))
    torch.testing.assert_close(found["L_pseudo"], 0.4 * wanted)
    torch.testing.assert_close(found["L_error"].detach(), prediction_loss(error, out.logits, s.batch.label).detach())
    predictor = {name for name, _ in s.method.named_parameters()}
    model, own = s.reached(found["L_error"])
    assert model == set() and own and own <= predictor and predictor == set(s.method.state_dict())
    model, own = s.reached(s.method.losses(s.forward(), s.batch)["L_pseudo"])
    assert "head.weight" in model and own == set()
    assert s.method.rates()[-1] == (s.method.predictor, pytest.approx(5e-4))

"""L-Reg, PIM, the marginal entropy alone and L-Reg's variant of PIM, against loops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.methods.lreg import (
    ErrorPredictor,
    conditional_entropy,
    logical_regularisation,
    marginal_entropy,
    orthogonality,
    prediction_loss,
    weighted_pseudo_loss,
)

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-3.0, 0.5, 0.0], [0.2, 0.1, 0.0]])
LABEL = torch.tensor([0, -1, 2, -1])
P = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in LOGITS.tolist()]


def test_each_class_on_a_dimension_of_its_own_is_best() -> None:
    assert float(logical_regularisation(1e3 * torch.eye(4), torch.eye(4))) == pytest.approx(-math.log(4), abs=1e-5)


def test_orthogonality_by_hand() -> None:
    features = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert float(orthogonality(features)) == pytest.approx(4 * 0.5**2 / 4)  # [[1.5, .5], [.5, 1.5]] - 1
    assert float(orthogonality(torch.eye(3))) == 0


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p)


def test_entropies_by_hand() -> None:
    mean = [sum(row[c] for row in P) / 4 for c in range(3)]
    assert float(marginal_entropy(LOGITS)) == pytest.approx(entropy(mean), abs=1e-6)
    wanted = (entropy(P[1]) + entropy(P[3])) / 2
    assert float(conditional_entropy(LOGITS, LABEL < 0)) == pytest.approx(wanted, abs=1e-6)


def test_extreme_logits_have_finite_gradients() -> None:
    logits, features = torch.tensor([[1e4, 0.0, 0.0], [1e4, 0.0, -1e4]]).requires_grad_(), torch.randn(2, 6)
    some = torch.tensor([True, True])
    total = marginal_entropy(logits) + conditional_entropy(logits, some) + logical_regularisation(logits, features)
    total.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_without_unlabelled_samples_the_terms_are_zero() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    logits = LOGITS.clone().requires_grad_()
    for value in (conditional_entropy(logits, none), weighted_pseudo_loss(logits, none, torch.ones(4))):
        assert float(value.detach()) == 0 and value.requires_grad


def test_predicted_errors_are_shares() -> None:
    torch.manual_seed(0)
    out = ErrorPredictor(3)(50 * torch.randn(200, 3)).detach()
    assert float(out.min()) == 0 and float(out.max()) == 1


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_terms_are_those_of_the_output(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}pim-lreg", hparams={"confidence": 0.4})
    out, rows = s.forward(), s.batch.label < 0
    found = s.method.losses(out, s.batch)
    error = s.method.predictor(out.logits.detach()).detach()
    assert (error > 0).any()
    torch.testing.assert_close(found["L_pseudo"], 0.4 * weighted_pseudo_loss(out.logits, rows, 1 - error.mean(1)))
    torch.testing.assert_close(found["L_error"].detach(), prediction_loss(error, out.logits, s.batch.label).detach())
    found = scene(f"{first}pim", hparams={"pim": 0.3, "marginal": 2.0}).method.losses(out, s.batch)
    torch.testing.assert_close(found["L_pim"], 0.3 * conditional_entropy(out.logits, rows))
    torch.testing.assert_close(found["L_marginal"], -2 * marginal_entropy(out.logits))
    found = scene(f"{first}lreg", hparams={"lreg": 0.2, "ortho": 0.5}).method.losses(out, s.batch)
    torch.testing.assert_close(found["L_reg"], 0.2 * logical_regularisation(out.logits, out.features))
    torch.testing.assert_close(found["L_ortho"], 0.5 * orthogonality(out.features))

"""L-Reg against loops over classes and dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.methods.lreg import logical_regularisation, orthogonality


def test_the_term_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    logits, features = torch.randn(5, 3, generator=g), torch.randn(5, 4, generator=g)
    score = [[sum(float(logits[b, c] * features[b, j]) for b in range(5)) for j in range(4)] for c in range(3)]
    share = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in score]
    together = [sum(row[j] for row in share) / 3 for j in range(4)]
    wanted = sum(t * math.log(t) for t in together) - sum(a * math.log(a) for row in share for a in row) / 3
    assert float(logical_regularisation(logits, features)) == pytest.approx(wanted, abs=1e-6)


def test_its_best_is_one_dimension_a_class_and_all_dimensions_together() -> None:
    """Each class on its own dimension: -log D; all on one, or all on all: 0."""
    large = 1e3 * torch.eye(4)
    assert float(logical_regularisation(large, torch.eye(4))) == pytest.approx(-math.log(4), abs=1e-5)
    assert float(logical_regularisation(large, torch.eye(4)[[0] * 4])) == pytest.approx(0, abs=1e-5)
    assert float(logical_regularisation(torch.zeros(4, 4), torch.eye(4))) == pytest.approx(0, abs=1e-5)


def test_large_logits_give_finite_gradients() -> None:
    logits, features = (1e3 * torch.randn(4, 3)).requires_grad_(), torch.randn(4, 6).requires_grad_()
    logical_regularisation(logits, features).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_orthogonality_by_hand() -> None:
    features = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert float(orthogonality(features)) == pytest.approx(4 * 0.5**2 / 4)  # [[1.5, .5], [.5, 1.5]] - 1
    assert float(orthogonality(torch.eye(3))) == 0


@pytest.mark.parametrize("name", ["lreg", "patchgen+lreg"])
def test_weights_and_gradients(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, hparams={"lreg": 0.2, "ortho": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    assert list(found)[-2:] == ["L_reg", "L_ortho"] and "L_ortho" not in scene(name).method.losses(out, s.batch)
    torch.testing.assert_close(found["L_reg"], 0.2 * logical_regularisation(out.logits, out.features))
    torch.testing.assert_close(found["L_ortho"], 0.5 * orthogonality(out.features))
    model, own = s.reached(found["L_reg"])
    assert {"head.weight", "head.bias"} <= model and own == set()
    assert any(n.startswith("backbone.") for n in model) and not list(s.method.parameters())

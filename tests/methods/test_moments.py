"""Domain invariance without labels: closed forms, what is zero, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.gmdg import moment_distance


def test_equal_second_moments_have_no_distance() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    domain = torch.tensor([0] * 4 + [3] * 4)
    assert float(moment_distance(torch.cat([x, x.flip(0)]), domain)) == pytest.approx(0, abs=1e-12)
    assert float(moment_distance(torch.cat([x, -x]), domain)) == pytest.approx(0, abs=1e-12)  # not centred
    assert float(moment_distance(torch.cat([x, 2 * x]), domain)) > 1e-4


def test_it_is_the_distance_of_the_matrices() -> None:
    x, domain = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 2, 2, 2, 5, 5])
    unit = x / x.norm()
    moments = [unit[domain == e].T @ unit[domain == e] / int((domain == e).sum()) for e in (0, 2, 5)]
    mean = sum(moments) / 3
    wanted = sum(float(((c - mean) ** 2).mean()) for c in moments) / 3
    assert float(moment_distance(x, domain)) == pytest.approx(wanted, rel=1e-4)


def test_one_dimension_by_hand() -> None:
    """Domains {1, 2} and {3}: squares 1, 4, 9 over their sum 14; moments 2.5 / 14 and 9 / 14."""
    found = moment_distance(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1]))
    assert float(found) == pytest.approx(((9 - 2.5) / 14 / 2) ** 2, rel=1e-5)


def test_the_term_is_as_steep_as_the_cross_entropy(scene: Callable[..., Any]) -> None:
    s = scene("domain-moments", sources=(0, 2), hparams={"moments": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    main, term = (
        torch.autograd.grad(found[name], out.features, retain_graph=True)[0] for name in ("main", "L_moments")
    )
    assert float(term.abs().max()) == pytest.approx(0.5 * float(main.abs().max()), rel=1e-4)
    reached, own = s.reached(found["L_moments"])
    assert reached and all("norm" in name for name in reached) and not own


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


def test_fixed_features_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing can move them; choose --tune layernorm"):
        make_method(Config("photos", "site_c", method="domain-moments", tune="head"))

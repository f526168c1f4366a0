"""mDSDI: a head in two parts, its terms by loops, which tensors each may move, and runs that predict and explain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.mdsdi import TwoPartHead, risk_after_a_step, squared_covariance
from patchgen.predict.predictor import load_run

PLACE = torch.tensor([0, 0, 0, 1, 1, 1])  # of the scene's domains among the sources


def points(rows: int, dim: int, seed: int) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def test_the_head_reads_both_parts() -> None:
    torch.manual_seed(0)
    head, x = TwoPartHead(5, 3), points(4, 5, 0)
    with torch.no_grad():
        head.bias += torch.tensor([1.0, -2.0, 0.5])
    both = torch.cat([x @ head.invariant.weight.T, x @ head.specific.weight.T], 1)
    torch.testing.assert_close(head(x), both @ head.joint.weight.T + head.bias)
    torch.testing.assert_close(head(x), F.linear(x, head.weight, head.bias))
    assert (head.in_features, head.out_features, head.weight.shape) == (5, 3, (3, 5))
    torch.testing.assert_close(head.invariant(x).norm(dim=1), x.norm(dim=1))


def test_covariance_equals_loops_and_is_zero_for_unrelated_columns() -> None:
    a, b = points(6, 2, 1), points(6, 3, 2)
    total = 0.0
    for i in range(2):
        for j in range(3):
            products = [float((a[n, i] - a[:, i].mean()) * (b[n, j] - b[:, j].mean())) for n in range(6)]
            total += (sum(products) / 5) ** 2
    assert float(squared_covariance(a, b)) == pytest.approx(total / 6, rel=1e-4)
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert float(squared_covariance(signs[:, :1], signs[:, 1:])) == 0
    assert float(squared_covariance(signs[:, :1], signs[:, :1])) == pytest.approx((4 / 3) ** 2)


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
    head, x, label = TwoPartHead(5, 3), points(6, 5, 3), torch.tensor([0, 2, 2, 1, 0, -1])
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
    torch.testing.assert_close(found["L_covariance"], 3 * squared_covariance(i, q))
    value, _ = meta_by_hand(head, x.detach(), s.batch.label, 0.1)
    assert float(found["L_meta"].detach()) == pytest.approx(4 * value, rel=1e-4)


def test_the_invariant_part_is_pushed_the_other_way(scene: Callable[..., Any]) -> None:
    s = scene("mdsdi", sources=(0, 2), hparams={"invariant": 0.5})
    out = s.forward()
    projection, network = s.model.head.invariant.weight, s.method.adversary[0].weight
    got = torch.autograd.grad(s.method.losses(out, s.batch)["L_invariant"], [projection, network], retain_graph=True)
    plain = F.cross_entropy(s.method.adversary(s.model.head.invariant(out.features)), PLACE)
    wanted = torch.autograd.grad(plain, [projection, network])
    torch.testing.assert_close(got[0], -0.5 * wanted[0])
    torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.parametrize(
    ("term", "head"),
    [
        ("main", {"invariant.weight", "specific.weight", "joint.weight", "bias"}),
        ("L_invariant", {"invariant.weight"}),
        ("L_specific", {"specific.weight"}),
        ("L_covariance", {"invariant.weight", "specific.weight"}),
        ("L_meta", {"specific.weight", "joint.weight", "bias"}),
    ],
)
def test_which_part_of_the_head_each_term_reaches(term: str, head: set[str], scene: Callable[..., Any]) -> None:
    s = scene("mdsdi", sources=(0, 2))
    model, _ = s.reached(s.method.losses(s.forward(), s.batch)[term])
    assert {name.removeprefix("head.") for name in model if name.startswith("head.")} == head


def test_a_head_that_is_not_linear_is_not_thrown_away(scene: Callable[..., Any]) -> None:
    s = scene("lp-ln")
    s.model.add_module("head", nn.Sequential(s.model.head))
    with pytest.raises(ValueError, match="method 'mdsdi' needs a linear head"):
        make_method(Config("photos", "site_c", method="mdsdi")).extend(s.model)


def test_a_finished_run_predicts_what_it_recorded(tiny_run: Callable[..., Any], image_folder: Path) -> None:
    run = tiny_run("patchgen+mdsdi")
    predictor = load_run(run.path)
    assert isinstance(predictor.model.head, TwoPartHead)
    paths = sorted((image_folder / "studio").rglob("*.png"))
    right = [found.label == path.parent.name for found, path in zip(predictor.predict(paths), paths, strict=True)]
    test = next(record for record in run.records("test") if record["checkpoint"] == "selected")
    assert sum(right) / len(right) == pytest.approx(test["all"]["accuracy"])
    assert predictor.explain(paths[0]).mask.shape == predictor.model.grid

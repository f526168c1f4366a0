"""Sums: a method and a term that is added to it; nothing of either is lost, and every other sum is refused in words."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from patchgen.config import Config
from patchgen.methods import METHODS, WITH_LREG, make_method
from patchgen.train.loop import Step, make_optimizer, take_step

ADDABLE = [name for name, method in METHODS.items() if method.addable]


class Traces(NamedTuple):
    """What a step leaves behind."""

    terms: set[str]  # but for those that MLDG repeats on its test domains
    rates: dict[str, float]  # of the method's own parameters
    reached: set[str]  # those with a gradient that is not 0


class WatchedStep(Step):
    """Keeps the names of the losses, and whom they reach."""

    terms: set[str]
    reached: set[str]

    def backward(self, losses: dict[str, Tensor], watched: dict[str, Tensor] | None = None) -> None:
        self.terms.update(name.removeprefix("meta_") for name in losses)
        super().backward(losses, watched)

    def apply(self) -> None:
        named = self.method.named_parameters()
        self.reached.update(name for name, tensor in named if tensor.grad is not None and tensor.grad.any())
        super().apply()


@functools.cache
def traces(name: str, scene: Callable[..., Any]) -> Traces:
    """One step of the method."""
    method, model, batch = scene(name, sources=(0, 2))
    optimizer = make_optimizer(model, method)
    rate_of = {id(tensor): group["lr"] for group in optimizer.param_groups for tensor in group["params"]}
    step = WatchedStep(method, model, optimizer, lambda: batch)
    step.terms, step.reached = set(), set()
    take_step(step)
    return Traces(step.terms, {n: rate_of[id(tensor)] for n, tensor in method.named_parameters()}, step.reached)


SUMS = [
    *(f"{first}+{term}" for first in ("lp-ln", "patchgen") for term in ADDABLE),
    *(f"full+{term}+lreg" for term in WITH_LREG),
    "patchgen-select+entropy",
]


@pytest.mark.parametrize("name", SUMS)
def test_nothing_of_a_part_is_lost(name: str, scene: Callable[..., Any]) -> None:
    found, parts = traces(name, scene), [traces(part, scene) for part in name.split("+")]
    assert found.terms == set().union(*(part.terms for part in parts))
    assert found.reached >= set().union(*(part.reached for part in parts))
    rates = {key: rate for part in parts for key, rate in part.rates.items()}
    assert {key: found.rates[key] for key in rates} == rates


def test_a_sum_has_the_first_ones_choices() -> None:
    method = make_method(Config("photos", "site_c", method="full+gmdg+lreg", hparams={"lreg": 0.5}))
    assert (method.chosen_pool, method.chosen_tune) == ("cls", "full")
    assert method.hparams == METHODS["gmdg"].all_defaults() | {"lreg": 0.5, "ortho": 0.0}
    assert type(method).__name__ == "full+gmdg+lreg"


NO_SUMS = ("miro+patchgen", "gmdg+miro", "patchgen+miro+miro", "patchgen+coral+lreg", "full+gmdg+lreg+sma")


@pytest.mark.parametrize(("name", "rule"), [
    *((name, "a sum is a method like lp-ln, .* and one term, or one of miro.lreg") for name in NO_SUMS),
    ("patchgen-select+balance", "'patchgen-select' has the terms of 'balance' already; leave 'balance' out"),
    ("lp-ln+", "unknown method ''"),
])  # fmt: skip
def test_other_sums_are_refused(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_method(Config("photos", "site_c", method=name))


# Learning rates of the parts


def test_the_common_name_is_for_all_parts_and_an_own_name_for_one(scene: Callable[..., Any]) -> None:
    s = scene("patchgen-select+dann", sources=(0, 2), lr=1e-3, hparams={"lr_mult": 3.0, "dann_lr_mult": 0.5})
    rates = {id(module): rate for module, rate in s.method.rates()}
    assert [rates[id(part)] for part in (s.method.expert, s.method.discriminator)] == pytest.approx([3e-3, 5e-4])

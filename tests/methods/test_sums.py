"""Sums of methods: whatever two are added, nothing of either is lost, or the sum is refused in words."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import METHODS, Method, make_method
from patchgen.methods.build import build_on
from patchgen.methods.guards import ON_LOGITS
from patchgen.methods.mixup import mix
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import Output
from patchgen.train.optim import make_optimizer
from patchgen.train.step import PlainStep

ADDABLE = [name for name, method in METHODS.items() if method.addable]
READERS = [name for name in ADDABLE if METHODS[name].on_logits == "read"]
SOURCES, LABEL = (0, 2), (0, 2, 2, 1, 0, -1)


def config(method: str, **changes: Any) -> Config:
    return Config(data="photos", unseen="site_c", backbone="tiny", image_size=28, method=method, **changes)


class Traces(NamedTuple):
    """What a step leaves behind."""

    terms: set[str]
    rates: dict[str, float]  # of the method's own parameters
    reached: set[str]  # those with a gradient that is not 0


class WatchedStep(PlainStep):
    """Keeps the names of the losses, and whom they reach; methods work on copies of it, which share these sets."""

    terms: set[str]
    reached: set[str]

    def backward(self, losses: dict[str, Tensor], watched: dict[str, Tensor] | None = None) -> None:
        self.terms.update(losses)
        super().backward(losses, watched)

    def apply(self) -> None:
        named = self._method.named_parameters()
        self.reached.update(name for name, tensor in named if tensor.grad is not None and tensor.grad.any())
        super().apply()


@functools.cache
def backbone() -> Any:
    return load_backbone("tiny")


@functools.cache
def traces(name: str) -> Traces:
    """One step of the method."""
    settings = config(name)
    method = make_method(settings)
    model = build_on(copy.deepcopy(backbone()), settings, method, 3)
    method.sources = SOURCES
    torch.manual_seed(0)
    method.setup(model)
    image = torch.randn(len(LABEL), 3, 28, 28, generator=torch.Generator().manual_seed(1))
    batch = Batch(image, torch.tensor(LABEL), torch.tensor([0, 0, 0, 2, 2, 2]), torch.arange(len(LABEL)))
    optimizer = make_optimizer(model, settings, method)
    rate_of = {id(tensor): group["lr"] for group in optimizer.param_groups for tensor in group["params"]}
    step = WatchedStep(method, model, optimizer, batch)
    step.terms, step.reached = set(), set()
    step.take()
    rates = {name: rate_of[id(tensor)] for name, tensor in method.named_parameters()}
    return Traces(step.terms, rates, step.reached)


@pytest.mark.parametrize("place", range(len(ADDABLE) - 1), ids=ADDABLE[:-1])
def test_of_two_methods_nothing_is_lost(place: int) -> None:
    first = ADDABLE[place]
    for other in ADDABLE[place + 1 :]:
        accepted = [name for name in (f"{first}+{other}", f"{other}+{first}") if is_accepted(name)]
        both_orders = {first, other} & {"mtl", "rsc"}  # in other sums the order decides that of the terms alone
        for name in accepted if both_orders else accepted[:1]:
            found, one, two = traces(name), traces(first), traces(other)
            assert found.terms == one.terms | two.terms, name
            assert found.reached >= one.reached | two.reached, name
            assert {k: found.rates[k] for k in one.rates | two.rates} == one.rates | two.rates, name


def is_accepted(name: str) -> bool:
    try:
        make_method(config(name))
    except ValueError as error:
        assert str(error).startswith(f"method {name!r}: ")
        return False
    return True


# The logits, from the last part to the first


@pytest.mark.parametrize("name", ADDABLE)
def test_what_a_term_does_with_the_logits_is_declared(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, sources=SOURCES)
    values, handed = [], []
    for scale in (1.0, 1.1):  # the arg-max, which a missing label is replaced by, stays
        out = s.forward()
        torch.manual_seed(0)
        with seen_by_the_first(handed):
            values.append(s.method.losses(out._replace(logits=scale * out.logits), s.batch))
        values[-1].pop("main")
    changed = [term for term, value in values[0].items() if not torch.equal(value, values[1][term])]
    wanted = "read" if changed or s.method.replaces_main else ""
    assert s.method.on_logits in ("shift", "replace") if name in ("mtl", "rsc") else s.method.on_logits == wanted
    assert (s.method.on_logits == "replace") == torch.equal(handed[0].logits, handed[1].logits)


@pytest.mark.parametrize("other", READERS)
@pytest.mark.parametrize("changer", ["mtl", "rsc"])
def test_terms_read_the_logits_that_are_minimised(changer: str, other: str, scene: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError, match=f"'{changer}' does to the logits would be lost on '{other}'; name '{changer}' af"
    ):
        make_method(config(f"{changer}+{other}"))
    s = scene(f"{other}+{changer}", sources=SOURCES, hparams={"groupdro": 0.0} if other == "groupdro" else {})
    if changer == "mtl":
        torch.nn.init.normal_(s.method.shift.weight)  # 0 at the start
    torch.manual_seed(0)
    batch = mix(s.batch, 0.2) if other == "mixup" else s.batch
    handed: list[Output] = []
    out = s.forward()
    torch.manual_seed(0)
    with seen_by_the_first(handed):
        found = s.method.losses(out, batch)
    assert not torch.allclose(handed[0].logits, out.logits)
    s.forward()  # MIRO's part of GMDG takes what the last pass left
    torch.manual_seed(0)
    wanted = METHODS[other].losses(s.method, handed[0], batch)
    assert found.keys() == wanted.keys()
    for term in found:
        torch.testing.assert_close(found[term], wanted[term])


class seen_by_the_first:
    """While it lasts, keeps the outputs that reach the first part of a sum."""

    def __init__(self, handed: list[Output]) -> None:
        self.handed, self.patch = handed, pytest.MonkeyPatch()

    def __enter__(self) -> None:
        whole = Method.losses

        def losses(method: Method, out: Output, batch: Batch) -> dict[str, Tensor]:
            self.handed.append(out)
            return whole(method, out, batch)

        self.patch.setattr(Method, "losses", losses)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("rsc+mtl", "what 'mtl' does to the logits would be lost on 'rsc'; name 'rsc' after 'mtl'"),
        ("patchgen+mtl+coral+vrex", "what 'mtl' does to the logits would be lost on 'vrex'; name 'mtl' after 'vrex'"),
        ("mtl+gestur", "'gestur' would hide what 'mtl' predicts with; name 'mtl' after 'gestur'"),
        ("groupdro+mtl+mixup", "groupdro and mixup both replace the main loss; leave one out"),
    ],
)
def test_orders_that_lose_something_are_refused(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_method(config(name))


@pytest.mark.parametrize("name", ["patchgen+vrex+mtl+rsc", "coral+mtl+dann", "gestur+irm+mtl+sma", "rsc+coral"])
def test_orders_that_lose_nothing_are_taken(name: str) -> None:
    assert {METHODS[part].on_logits for part in name.split("+")} <= set(ON_LOGITS)
    assert is_accepted(name)


# Learning rates of the parts


@pytest.mark.parametrize("name", ["miro+dann", "dann+miro", "patchgen+pim-lreg+cdann+gmdg", "sagnet+dann"])
def test_each_part_learns_at_its_own_rate(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, sources=SOURCES, lr=1e-3)
    rates = {id(module): rate for module, rate in s.method.rates()}
    assert rates[id(s.method.discriminator)] == pytest.approx(1e-3)
    others = [part for part in ("variances", "predictor", "embedding", "style") if hasattr(s.method, part)]
    assert others and [rates[id(getattr(s.method, part))] for part in others] == pytest.approx([1e-2] * len(others))


def test_the_common_name_is_for_all_parts_and_an_own_name_for_one(scene: Callable[..., Any]) -> None:
    s = scene("miro+dann+pim-lreg", sources=SOURCES, lr=1e-3, hparams={"lr_mult": 3.0, "dann_lr_mult": 0.5})
    rates = {id(module): rate for module, rate in s.method.rates()}
    parts = (s.method.variances, s.method.predictor, s.method.discriminator)
    assert [rates[id(part)] for part in parts] == pytest.approx([3e-3, 3e-3, 5e-4])
    with pytest.raises(ValueError, match="method 'coral' has no hyper-parameter 'lr_mult'"):
        make_method(config("coral", hparams={"lr_mult": 3.0}))
    with pytest.raises(ValueError, match="dann_lr_mult must be a number that is not negative"):
        make_method(config("dann", hparams={"lr_mult": -1.0}))

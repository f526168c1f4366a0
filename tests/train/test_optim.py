"""Which parameters learn at which rate, and an optimiser state that goes on exactly."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.build import build_model, load_trained
from patchgen.model.classifier import Classifier, trained_tensors
from patchgen.runs.tensors import load_tensors, save_tensors
from patchgen.train.lifecycle import optimizer_tensors, restore_optimizer
from patchgen.train.loop import make_optimizer, plain_step, set_rates


def settings(**changes: Any) -> Config:
    return Config(data="photos", unseen="site_c", backbone="tiny", image_size=56, lr=0.1, **changes)


def make(config: Config) -> Classifier:
    return build_model(config, make_method(config), 3)


def groups(model: Classifier, config: Config) -> dict[str, tuple[float, set[str]]]:
    """name -> (rate, names of its parameters)"""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found = make_optimizer(model, make_method(config)).param_groups
    return {group["name"]: (group["lr"], {name_of[id(p)] for p in group["params"]}) for group in found}


def expected(model: Classifier, method: str) -> dict[str, set[str]]:
    """By module types, not by requires_grad."""
    every = {name for name, _ in model.named_parameters()}
    norms = {
        f"{where}.{name}" for where, module in model.named_modules() if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters() if where.startswith("backbone.")
    }  # fmt: skip
    tuned = {"lp": set(), "full": {name for name in every if name.startswith("backbone.")}}.get(method, norms)
    parts = {"head": {"head.weight", "head.bias"}, "select": {n for n in every if n.startswith("select.")}}
    return {name: names for name, names in (parts | {"backbone": tuned}).items() if names}


@pytest.mark.parametrize("method", ["lp", "lp-ln", "full", "patchgen", "patchgen-no-losses"])
def test_groups_hold_exactly_what_the_method_trains(method: str) -> None:
    config = settings(method=method, lr_module=0.2, lr_backbone=0.3, weight_decay=0.01)
    model = make(config)
    found, wanted = groups(model, config), expected(model, method)
    assert {name: names for name, (_, names) in found.items()} == wanted
    rates = {"head": 0.1, "select": 0.2, "backbone": 0.3}
    assert {name: rate for name, (rate, _) in found.items()} == {name: rates[name] for name in wanted}
    assert all(group["weight_decay"] == 0.01 for group in make_optimizer(model, make_method(config)).param_groups)


def test_rates_left_out_are_the_heads_and_zero_is_a_rate() -> None:
    config = settings(method="patchgen")
    assert {rate for rate, _ in groups(make(config), config).values()} == {0.1}
    config = settings(method="patchgen", lr_module=0.0, lr_backbone=0.0)
    assert {name: rate for name, (rate, _) in groups(make(config), config).items()} == {
        "head": 0.1, "select": 0.0, "backbone": 0.0,
    }  # fmt: skip


def step(model: Classifier, optimizer: torch.optim.Optimizer, seed: int) -> None:
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(model(images).logits, torch.tensor([0, 2])).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("method", "kind"), [("patchgen", None), ("full", None), ("lp", "adamw"), ("lp", "sgd")])
def test_a_restored_optimizer_takes_the_identical_next_step(method: str, kind: Any, tmp_path: Path) -> None:
    config = settings(method=method, optimizer=kind, weight_decay=0.01)
    model = make(config)
    optimizer = make_optimizer(model, make_method(config))
    for number in range(2):
        step(model, optimizer, number)
    both = {f"m.{k}": v for k, v in trained_tensors(model).items()}
    both |= {f"o.{k}": v for k, v in optimizer_tensors(optimizer).items()}
    save_tensors(tmp_path / "state.safetensors", both, {})
    saved = load_tensors(tmp_path / "state.safetensors")[0]

    other = make(config)
    load_trained(other, {k[2:]: v for k, v in saved.items() if k.startswith("m.")})
    again = make_optimizer(other, make_method(config))
    restore_optimizer(again, {k[2:]: v for k, v in saved.items() if k.startswith("o.")})
    step(model, optimizer, 2)
    step(other, again, 2)
    for name, tensor in trained_tensors(model).items():
        assert torch.equal(tensor, trained_tensors(other)[name]), name
    one, two = optimizer_tensors(optimizer), optimizer_tensors(again)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_settings_choose_the_optimizer(kind: Any) -> None:
    config = settings(method="lp", optimizer=kind, weight_decay=0.01)
    assert type(make_optimizer(make(config), make_method(config))) is KINDS[kind or "adam"]
    config = settings(method="clipood", optimizer=kind)
    method = make_method(config)
    assert type(make_optimizer(make(settings(method="lp")), method)) is KINDS[kind or "adamw"]


def test_gradients_are_clipped_to_a_norm() -> None:
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    batch = Batch(images, torch.tensor([0, 2]), torch.zeros(2, dtype=torch.int64), torch.arange(2))

    def gradient(longest: float | None) -> float:
        """Its norm, from the change of the weights in a plain step."""
        config = settings(method="lp", optimizer="sgd", clip_gradients=longest)
        model = make(config)
        before = torch.cat([p.detach().flatten() for p in model.head.parameters()])
        plain_step(make_method(config), model, make_optimizer(model, make_method(config)), batch)
        return float((torch.cat([p.detach().flatten() for p in model.head.parameters()]) - before).norm()) / 0.1

    free = gradient(None)
    assert gradient(free / 2) == pytest.approx(free / 2, rel=1e-4) and gradient(100 * free) == pytest.approx(free)


def test_a_cosine_begins_at_the_whole_rate_and_ends_before_zero() -> None:
    config = settings(method="patchgen", lr_module=0.3, lr_schedule="cosine", steps=10)
    method = make_method(config)
    optimizer = make_optimizer(make(config), method)
    for number in (9, 0, 5):  # a function of the step alone, so that a resumed run has the same
        set_rates(optimizer, method, number)
        share = 0.5 + 0.5 * math.cos(math.pi * number / 10)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates == pytest.approx({"head": 0.1 * share, "select": 0.3 * share, "backbone": 0.1 * share})


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_warm_up_rises_linearly_to_the_schedule(schedule: Any) -> None:
    config = settings(method="lp", lr_schedule=schedule, steps=10, warmup=4)
    optimizer, shares = make_optimizer(make(config), make_method(config)), []
    for number in range(10):
        set_rates(optimizer, make_method(config), number)
        shares.append(optimizer.param_groups[0]["lr"] / 0.1)
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    later = [1.0] * 5 if schedule == "constant" else [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(1, 6)]
    assert shares[5:] == pytest.approx(later)
    with pytest.raises(ValueError, match="warmup must be below steps = 10"):
        settings(method="lp", steps=10, warmup=10)

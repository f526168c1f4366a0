"""IRM and VREx without labels and at the change of weight; MLDG and Fish against copies that are trained apart."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.invariance import Irm, Vrex, irm_penalty, meta_pairs, scale_slope
from patchgen.model.classifier import Output, trained_tensors
from patchgen.runs.tensors import load_tensors
from patchgen.train.lifecycle import train
from patchgen.train.loop import make_optimizer, plain_step

LABELS = [0, 2, 2, 1, 0, 1, -1, 2, 1, 0, 0, 1]
DOMAINS = [0] * 4 + [2] * 4 + [3] * 4


def settings(method: str, **changes: Any) -> Config:
    return Config(data="photos", unseen="site_c", backbone="tiny", image_size=28, method=method, **changes)


def numbers() -> tuple[Tensor, Batch]:
    logits = 2 * torch.randn(len(LABELS), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(torch.empty(0), torch.tensor(LABELS), torch.tensor(DOMAINS), torch.arange(len(LABELS)))
    return logits, batch


def test_the_slope_is_that_of_the_labelled_images() -> None:
    logits, batch = numbers()
    scale = torch.ones((), requires_grad=True)
    loss = F.cross_entropy(logits.float() * scale, batch.label, ignore_index=-1)
    torch.testing.assert_close(scale_slope(logits, batch.label), *torch.autograd.grad(loss, scale))
    assert float(scale_slope(logits[:2], torch.tensor([-1, -1]))) == 0


@pytest.mark.parametrize("name", ["irm", "vrex"])
def test_weights_before_and_after_the_change(name: str) -> None:
    logits, batch = numbers()
    out = Output(logits, logits)
    parts = zip(logits.split(4), batch.label.split(4), strict=True)  # by domain
    risks = torch.stack([F.cross_entropy(part, label, ignore_index=-1) for part, label in parts])
    penalties = {"irm": float(irm_penalty(logits, batch)), "vrex": float(risks.var(correction=0))}
    method = make_method(settings(name, hparams={name: 7.0}))
    assert isinstance(method, Irm | Vrex) and method.change == 500  # of the field's 5001
    for full, weight in ((False, 1.0), (True, 7.0)):
        method.full = full
        found = method.losses(out, batch)
        assert list(found) == ["main", f"L_{name}"]
        assert float(found[f"L_{name}"]) == pytest.approx(weight * penalties[name], rel=1e-5)
        torch.testing.assert_close(found["main"], F.cross_entropy(logits.float(), batch.label, ignore_index=-1))


@pytest.mark.parametrize("name", ["irm", "vrex", "full+vrex"])
def test_the_change_comes_once_and_empties_the_optimiser(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, steps=10, hparams={"anneal": 0.25})
    optimizer = make_optimizer(s.model, s.method)
    ages, full = [], []
    for number in range(5):
        plain_step(s.method, s.model, optimizer, s.batch, number)
        ages.append({int(state["step"]) for state in optimizer.state.values()})
        full.append(s.method.full)
    assert full == [False, False, True, True, True]
    assert ages == [{1}, {2}, {1}, {2}, {3}]


def test_the_share_of_the_change() -> None:
    assert make_method(settings("irm", steps=5)).full  # less than a step: the full weight from the start
    assert make_method(settings("irm", steps=40, hparams={"anneal": 1.0})).change == 40  # never


# MLDG and Fish: whole steps against copies of the model


DOMAIN = [0] * 3 + [2] * 3 + [3] * 3 + [7] * 3
LABEL = [0, 2, 1, 1, 0, -1, 2, 2, 0, 1, 1, 0]
STEPS = 3


def batch_of(seed: int) -> Batch:
    image = torch.randn(12, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
    return Batch(image, torch.tensor(LABEL), torch.tensor(DOMAIN), torch.arange(12))


def loss_of(s: Any, model: nn.Module, domain: int, batch: Batch) -> Tensor:
    rows = [i for i, d in enumerate(DOMAIN) if d == domain]
    part = Batch(batch.image[rows], batch.label[rows], batch.domain[rows], batch.index[rows])
    total: Tensor = sum(s.method.losses(model(part.image), part).values())
    return total


def optimiser_of(s: Any, model: Any) -> torch.optim.Adam:
    return make_optimizer(model, s.method)


def slow_mldg(s: Any, model: Any, optimizer: torch.optim.Adam, batch: Batch, number: int) -> None:
    """As the paper's pseudo-code, with a copy of the whole model for each pair."""
    domains = sorted(set(DOMAIN))
    order = np.random.default_rng([s.method.config.seed, number]).permutation(4).tolist()
    tests = order[2:]
    total = {n: torch.zeros_like(p) for n, p in trained_tensors(model).items()}
    for i, j in zip(order[:2], itertools.cycle(tests), strict=False):
        clone = copy.deepcopy(model)
        inner = optimiser_of(s, clone)
        inner.zero_grad()
        loss_of(s, clone, domains[i], batch).backward()
        for n, p in trained_tensors(clone).items():
            total[n] += p.grad.clone() if p.grad is not None else 0
        inner.step()
        inner.zero_grad()
        loss_of(s, clone, domains[j], batch).backward()
        for n, p in trained_tensors(clone).items():
            total[n] += 0.7 * p.grad if p.grad is not None else 0
    for n, p in trained_tensors(model).items():
        p.grad = total[n] / 4
    optimizer.step()


def slow_fish(s: Any, model: Any, optimizer: torch.optim.Adam, batch: Batch, number: int) -> None:
    """A copy walks over the domains with an optimiser whose memory lasts."""
    clone = copy.deepcopy(model)
    inner = optimiser_of(s, clone)
    inner.load_state_dict(optimizer.state_dict())
    for domain in sorted(set(DOMAIN)):
        inner.zero_grad()
        loss_of(s, clone, domain, batch).backward()
        inner.step()
    optimizer.load_state_dict(inner.state_dict())
    with torch.no_grad():
        for n, p in trained_tensors(model).items():
            p += 0.7 * (trained_tensors(clone)[n] - p)


SLOW = {"mldg": slow_mldg, "fish": slow_fish}


@pytest.mark.parametrize("host", ["", "patchgen+"])
@pytest.mark.parametrize("name", SLOW)
def test_steps_are_those_of_the_slow_version(name: str, host: str, scene: Callable[..., Any]) -> None:
    s = scene(host + name, lr=1e-3, lr_backbone=3e-4, weight_decay=0.01, hparams={name: 0.7})
    other = copy.deepcopy(s.model)
    start = copy.deepcopy(s.model.state_dict())
    ours, theirs = optimiser_of(s, s.model), optimiser_of(s, other)
    for number in range(STEPS):
        plain_step(s.method, s.model, ours, batch_of(number), number)
        SLOW[name](s, other, theirs, batch_of(number), number)
        for n, tensor in trained_tensors(other).items():
            torch.testing.assert_close(s.model.get_parameter(n), tensor, rtol=1e-5, atol=1e-7, msg=n)
    trained = trained_tensors(s.model)
    assert all(torch.equal(tensor, start[n]) for n, tensor in s.model.state_dict().items() if n not in trained)
    assert sum(not torch.equal(tensor, start[n]) for n, tensor in trained.items()) >= len(trained) - 2
    assert not any(p.grad is not None and p.grad.any() for p in s.model.parameters())


@pytest.mark.parametrize(
    ("count", "num_test", "pairs", "tests"), [(4, 2, 2, 2), (5, 1, 4, 1), (5, 4, 1, 1), (3, 2, 1, 1), (2, 2, 1, 1)]
)
def test_domains_are_divided(count: int, num_test: int, pairs: int, tests: int) -> None:
    seen = set()
    for seed in range(40):
        found = meta_pairs(count, num_test, np.random.default_rng(seed))
        trains, tested = {i for i, _ in found}, {j for _, j in found}
        assert len(found) == len(trains) == pairs and len(tested) == tests and not trains & tested
        seen |= trains
    assert seen == set(range(count))


def test_records_tell_both_losses_apart(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("patchgen+mldg", steps=2)
    first, last = (record["train"] for record in run.records("evaluation"))
    assert {"main", "L_ms", "L_conf", "L_sim", "meta_main", "meta_L_conf", "L_neg"} <= set(last)
    assert first["meta_main"] != first["main"] and "meta_L_neg" not in last


@pytest.mark.slow  # `tests/train/test_fold.py` has two processes for another method
def test_two_devices_make_the_steps_of_one(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**tiny_settings, "method": "mldg", "steps": 2, "accelerator": "cpu", "threads": 1, "swad": False}
    one = train(Config(**settings), tmp_path / "one", quiet=True)
    two = train(Config(**settings, devices=2), tmp_path / "two", quiet=True)
    for a, b in zip(one.records("evaluation"), two.records("evaluation"), strict=True):
        assert b["train"] == pytest.approx(a["train"], abs=2e-5)
    wanted, found = (load_tensors(run.checkpoint("selected"))[0] for run in (one, two))
    for n, tensor in wanted.items():
        torch.testing.assert_close(found[n], tensor, atol=2e-4, rtol=0)

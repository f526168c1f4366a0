"""Mixup: pairs, shares and the main loss against loops, and what other methods' terms see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.mixup import MixedBatch, mix, mixed_cross_entropy
from patchgen.model.classifier import trained_tensors
from patchgen.train.loop import plain_step
from patchgen.train.optim import make_optimizer

DOMAIN = [5, 0, 2, 0, 5, 2]  # in no order; equally many of each


def batch_of(label: list[int]) -> Batch:
    image = torch.randn(len(DOMAIN), 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return Batch(image, torch.tensor(label), torch.tensor(DOMAIN), torch.arange(len(DOMAIN)) + 10)


def test_pairs_go_round_with_one_share_each() -> None:
    batch = batch_of([0, 1, 2, 3, 4, 5])  # a label of its own for each image: it tells the partner
    circles = set()
    for seed in range(30):
        torch.manual_seed(seed)
        found = mix(batch, 0.2)
        own, partner = found.labels.tolist()
        assert own == list(range(6)) and sorted(partner) == own
        shares: dict[int, set[float]] = {}
        follows: dict[int, int] = {}
        for i, j in enumerate(partner):
            share = float(found.share[i])
            shares.setdefault(DOMAIN[i], set()).add(share)
            assert follows.setdefault(DOMAIN[i], DOMAIN[j]) == DOMAIN[j] != DOMAIN[i]
            torch.testing.assert_close(found.image[i], share * batch.image[i] + (1 - share) * batch.image[j])
            assert int(found.label[i]) == (i if share >= 0.5 else j)
        assert all(len(values) == 1 for values in shares.values()) and len(set.union(*shares.values())) == 3
        assert follows[follows[follows[0]]] == 0  # one circle through all
        circles.add(tuple(sorted(follows.items())))
        assert found.index.tolist() == batch.index.tolist() and torch.equal(found.domain, batch.domain)
    assert len(circles) == 2  # both ways round


def test_shares_are_those_of_a_beta_distribution() -> None:
    torch.manual_seed(0)
    batch = batch_of([0] * 6)
    shares = torch.cat([mix(batch, 0.2).share for _ in range(500)])
    # Beta(a, a): mean 1/2, variance 1 / (4 (2a + 1))
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.var()) == pytest.approx(1 / (4 * 1.4), abs=0.015)


def test_the_main_loss_is_that_of_a_loop() -> None:
    torch.manual_seed(1)
    found = mix(batch_of([0, 2, -1, 1, 1, 0]), 2.0)
    logits = torch.randn(6, 3)
    total = count = 0.0
    for i in range(6):
        p = [math.exp(float(value)) for value in logits[i]]
        for label, share in zip(found.labels[:, i].tolist(), (found.share[i], 1 - found.share[i]), strict=True):
            if label >= 0:
                total -= float(share) * math.log(p[label] / sum(p))
                count += float(share)
    assert count < 6 and float(mixed_cross_entropy(logits, found)) == pytest.approx(total / count, rel=1e-5)


def test_with_one_domain_nothing_is_blended() -> None:
    batch = batch_of([0, 1, 2, 0, 1, 2])
    alone = Batch(batch.image, batch.label, torch.zeros_like(batch.domain), batch.index)
    found = mix(alone, 0.2)
    torch.testing.assert_close(found.image, batch.image)
    assert torch.equal(found.label, batch.label)


@pytest.mark.parametrize("name", ["mixup", "patchgen+mixup"])
def test_a_step_sees_the_blended_batch(name: str, scene: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    s = scene(name, steps=20)
    whole, seen = type(s.method).losses, []

    def note(self: Any, out: Any, batch: Batch) -> Any:
        seen.append((out, batch, whole(self, out, batch)))
        return seen[-1][2]

    monkeypatch.setattr(type(s.method), "losses", note)
    optimizer = make_optimizer(s.model, s.method.config, s.method)
    before = {n: t.detach().clone() for n, t in trained_tensors(s.model).items()}
    torch.manual_seed(3)
    wanted = mix(s.batch, 0.2)
    with torch.no_grad():
        logits = s.model(wanted.image).logits
    torch.manual_seed(3)
    plain_step(s.method, s.model, optimizer, s.batch, 2)
    [(out, batch, losses)] = seen
    assert isinstance(batch, MixedBatch) and torch.equal(batch.image, wanted.image)
    torch.testing.assert_close(out.logits.detach(), logits)
    torch.testing.assert_close(losses["main"].detach(), mixed_cross_entropy(logits, wanted))
    moved = {n for n, t in trained_tensors(s.model).items() if not torch.equal(t, before[n])}
    assert {n for n in before if not n.endswith("key.bias")} <= moved


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("patchgen-true-mask+mixup", {}, "a blended image has no true mask"),
        ("lp+mixup", {"augment": False}, "computed once and cached; leave out --no-augment"),
    ],
)
def test_what_cannot_be_blended_is_refused(name: str, changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_method(Config(data="photos", unseen="site_c", method=name, **changes))

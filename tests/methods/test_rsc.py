"""RSC: which features are muted and in which images, by loops, and what of the losses then sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.methods.rsc import kept_features
from patchgen.model.losses import cross_entropy


def kept_by_hand(x: Tensor, target: list[int], head: nn.Module, part: float, images: float) -> Tensor:
    def probability(row: Tensor, y: int) -> float:
        scores = [math.exp(float((w @ row + b).detach())) for w, b in zip(head.weight, head.bias, strict=True)]
        return scores[y] / sum(scores)

    muted, falls = [], []
    for row, y in zip(x.detach(), target, strict=True):
        leaf = row.clone().requires_grad_()
        [slope] = torch.autograd.grad((head.weight @ leaf + head.bias)[y], leaf)
        order = sorted(range(len(row)), key=lambda j: -float(slope[j]))
        keep = torch.ones(len(row))
        keep[order[: round(part * len(row))]] = 0
        muted.append(keep)
        falls.append(probability(row, y) - probability(row * keep, y))
    hit = sorted(range(len(x)), key=lambda i: -falls[i])[: round(images * len(x))]
    return torch.stack([muted[i] if i in hit else torch.ones(x.shape[1]) for i in range(len(x))])


@pytest.mark.parametrize(("part", "images"), [(0.3333, 0.3333), (0.5, 0.6), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_muting_equals_its_definition(part: float, images: float) -> None:
    torch.manual_seed(0)
    head, x, target = nn.Linear(9, 3), torch.randn(6, 9), [0, 2, 1, 1, 0, 2]
    kept = kept_features(x, torch.tensor(target), head, part, images)
    assert torch.equal(kept, kept_by_hand(x, target, head, part, images))
    assert int((kept == 0).sum()) == round(9 * part) * round(6 * images)
    assert not kept.requires_grad


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_loss_reads_the_muted_features(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}rsc", hparams={"rsc_features": 0.25, "rsc_samples": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    target = [0, 2, 2, 1, 0, int(out.logits[5].argmax())]
    kept = kept_by_hand(out.features, target, s.model.head, 0.25, 0.5)
    logits = s.model.head(out.features * kept)
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-4
    if first:
        p = logits.softmax(1)[range(6), [*target[:5], int(logits[5].argmax())]]
        torch.testing.assert_close(found["L_conf"], -p.mean())

"""The contrastive losses against explicit loops, and the head's shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from patchgen.ccd.methods import info_nce, supervised_contrastive
from patchgen.ccd.model import ProjectionHead


def unit(rows: int, dim: int = 7, seed: int = 0) -> torch.Tensor:
    return F.normalize(
        torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1
    )


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_info_nce_equals_its_definition(temperature: float) -> None:
    z, count = unit(10), 5
    total = 0.0
    for i in range(2 * count):
        other = (i + count) % (2 * count)
        weight = [math.exp(float(z[i] @ z[j]) / temperature) for j in range(2 * count) if j != i]
        total -= math.log(math.exp(float(z[i] @ z[other]) / temperature) / sum(weight))
    assert float(info_nce(z, temperature)) == pytest.approx(total / (2 * count), rel=1e-10)


@pytest.mark.parametrize("label", [[0, 1, 0, 0, 1, 0], [2, -1, 2, 2, -1, 2], [0, 1, 2, 0, 1, 5]])
def test_supervised_contrast_equals_its_definition(label: list[int]) -> None:
    z, t = unit(6), 0.07
    rows = [i for i in range(6) if label[i] >= 0]
    anchors = []
    for i in rows:
        positives = [j for j in rows if j != i and label[j] == label[i]]
        if positives:
            base = math.log(sum(math.exp(float(z[i] @ z[j]) / t) for j in rows if j != i))
            anchors.append(-sum(float(z[i] @ z[j]) / t - base for j in positives) / len(positives))
    found = supervised_contrastive(z, torch.tensor(label), t)
    assert float(found) == pytest.approx(sum(anchors) / len(anchors), rel=1e-9)


@pytest.mark.parametrize("label", [[-1, -1, -1, -1], [0, 1, 2, 3], [0, -1, -1, -1]])
def test_nothing_to_compare_gives_zero_with_a_gradient(label: list[int]) -> None:
    z = unit(4).requires_grad_()
    loss = supervised_contrastive(z, torch.tensor(label))
    loss.backward()
    assert float(loss.detach()) == 0 and z.grad is not None and bool(z.grad.isfinite().all())


def test_the_head_gives_unit_vectors_and_ignores_the_length_of_its_directions() -> None:
    head = ProjectionHead(7, hidden=16, bottleneck=5, out=11)
    x = unit(3).float()
    before = head(x)
    assert before.shape == (3, 11)
    torch.testing.assert_close(before.norm(dim=1), torch.ones(3))
    with torch.no_grad():
        head.directions *= torch.rand(11, 1) + 0.5
    torch.testing.assert_close(head(x), before)


def test_labels_are_not_counted_on_the_way(asks: Any) -> None:
    z = unit(6).requires_grad_()
    with asks:
        supervised_contrastive(z, torch.tensor([2, -1, 2, 0, -1, 0])).backward()
    assert not asks.who

"""What a step costs: the byte counter, arithmetic, parameters, the ratios."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchgen.diagnose import cost
from patchgen.model.patchgen import PatchGen


@pytest.fixture(scope="module")
def tiny_cost() -> dict[str, Any]:
    return cost.count_step("tiny", image_size=56, batch=2)


def test_peak_memory_counts_what_is_alive() -> None:
    given = torch.zeros(1000)
    with cost.PeakMemory([given]) as memory:
        first = torch.zeros(100)  # 400 bytes
        view = given[:10].view(2, 5)  # given, so not counted
        second = first + 1  # 800 alive
        del first  # 400 alive
        third = second * 2  # 800
        second.add_(1)  # in place: nothing new
    assert (memory.alive, memory.peak) == (800, 800)
    del second, third, view
    assert memory.alive == 0


def test_flops_by_hand(tiny_cost: dict[str, Any]) -> None:
    """tiny: D = 64, 2 blocks, 16 patches + 5 prefix tokens, 1 head; the module sees the 16 patches."""
    dim, patches, tokens, classes = 64, 16, 21, cost.NUM_CLASSES
    linear = 2 * tokens * (4 * dim * dim + 2 * dim * 4 * dim)  # qkv, out and the two MLP layers of a block
    products = 2 * 2 * tokens * tokens * dim  # scores and values
    embed = 2 * patches * 3 * 14 * 14 * dim  # frozen, and nothing before it learns: forward only
    head = 3 * 2 * dim * classes  # forward, input and weight gradient
    baseline = embed + 2 * (2 * linear + 3 * products) + head
    assert tiny_cost["methods"]["lp-ln"]["gflops_per_image"] == pytest.approx(baseline / 1e9, rel=1e-6)

    over_patches = 3 * 2 * patches * 4 * dim * dim + 3 * 2 * 2 * patches * patches * dim
    added = (tiny_cost["methods"]["patchgen"]["gflops_per_image"]) * 1e9 - baseline
    assert over_patches < added < 1.2 * over_patches  # the rest: gate and refinement, on one vector an image
    assert tiny_cost["methods"]["patchgen"]["ratio"]["flops"] == pytest.approx(1 + added / baseline)


def test_parameters(tiny_cost: dict[str, Any]) -> None:
    baseline, patchgen = tiny_cost["methods"]["lp-ln"], tiny_cost["methods"]["patchgen"]
    added = patchgen["trainable_parameters"] - baseline["trainable_parameters"]
    assert patchgen["module_parameters"] == added == sum(p.numel() for p in PatchGen(64, 16).parameters())
    assert patchgen["module_of_backbone"] == added / tiny_cost["backbone"]["parameters"]
    norms = 2 * 2 * 2 * 64 + 2 * 64  # two in each of two blocks and a final one, weight and bias
    assert baseline["trainable_parameters"] == norms + 64 * cost.NUM_CLASSES + cost.NUM_CLASSES
    assert baseline["module_parameters"] == 0


def test_the_peak_of_a_step_is_that_of_a_fresh_rival_whatever_was_measured_before() -> None:
    rival = cost.make_rival("lp-ln", cost.load_architecture("tiny"), 28)
    data = cost.random_batch(2, 28)
    cost.count_flops(rival, data)
    fresh = cost.make_rival("lp-ln", cost.load_architecture("tiny"), 28)
    assert cost.step_peak(rival, data) == cost.step_peak(fresh, data)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"image_size": 57}, {"source": "dinov2-smal"}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|multiples of the patch size|did you mean 'dinov2-small'"):
        cost.count_step(**{"source": "tiny", "image_size": 56, **wrong})

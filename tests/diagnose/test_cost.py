"""What a step costs: bytes, arithmetic, parameters; and what is counted, against steps that are really made."""

from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.diagnose import cost
from patchgen.model.patchgen import PatchGen


@pytest.fixture(scope="module")
def tiny_cost() -> dict[str, Any]:
    return cost.compare_steps("tiny", "patchgen", 56)


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
    ratio = patchgen["peak_bytes"] / baseline["peak_bytes"]
    assert patchgen["ratio"]["peak_bytes"] == pytest.approx(ratio) and 1 < ratio < 2


# Counted without values

SETTINGS: list[Any] = [
    {"method": "lp-ln"},
    {"method": "patchgen"},
    {"method": "patchgen", "checkpoint_activations": True},
    {"method": "patchgen-cls", "precision": "bf16-mixed"},
    {"method": "gmdg"},
    pytest.param({"method": "full", "backbone": "resnet50", "image_size": 64}, marks=pytest.mark.slow),
]


def config_of(settings: dict[str, Any]) -> Config:
    return Config("random", "none", **{"backbone": "tiny", "image_size": 112, **settings})


@pytest.mark.parametrize("settings", SETTINGS)
def test_shapes_alone_tell_what_a_computed_step_allocates(settings: dict[str, Any]) -> None:
    shapes, computed = (cost.step_cost(config_of(settings), compute=compute) for compute in (False, True))
    assert shapes.flops == computed.flops and shapes.divisible == computed.divisible == (settings["method"] != "gmdg")
    assert shapes.per_image == pytest.approx(computed.per_image, rel=0.02)
    assert shapes.fixed == pytest.approx(computed.fixed, rel=0.02)


def test_the_count_is_what_autograd_saves() -> None:
    """Tensors that a real pass keeps for its backward pass, besides weights and images: the bulk of a step."""

    def saved(images: int) -> int:
        step = cost.make_step(config)
        batch = cost.random_batch(images, config.image_size)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        given = {t.untyped_storage().data_ptr() for t in (batch.image, *step.model.parameters())}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses = step.method.losses(step.model(batch.image), batch)
        assert losses
        return sum(size for place, size in storages.items() if place not in given)

    config = config_of({"method": "patchgen", "backbone": "dinov2-small", "image_size": 56})
    per_image = (saved(12) - saved(6)) / 6
    assert cost.step_cost(config).per_image == pytest.approx(per_image, rel=0.1)


def test_a_method_whose_steps_depend_on_values_is_computed_or_left_out() -> None:
    config = config_of({"method": "mixup", "image_size": 28})
    with pytest.raises(ValueError, match="'mixup': its steps depend on the values"):
        cost.step_cost(config)
    assert cost.step_cost(config, compute=True).per_image > 0
    assert cost.largest_step([("a", config, 6)]) == []


def test_the_largest_step_is_named_and_a_smaller_card_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (config_of({"method": "lp-ln", "image_size": side}) for side in (28, 56))
    steps = [("small", small, 12), ("large", large, 12), ("fewer", large, 6)]
    [line] = cost.largest_step(steps)
    assert line.startswith("largest step: 0.0 GB") and "for 12 images at once" in line and line.endswith(": large")
    monkeypatch.setattr(cost, "card_bytes", lambda: 1000)
    assert "WARNING: this card has 0.0 GB" in cost.largest_step(steps)[-1]

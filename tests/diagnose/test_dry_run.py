"""What a step is counted to need, against steps that are really made on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.diagnose import cost

SETTINGS: list[dict[str, Any]] = [
    {"method": "lp-ln"},
    {"method": "patchgen"},
    {"method": "patchgen", "checkpoint_activations": True},
    {"method": "patchgen-cls", "precision": "bf16-mixed"},
    {"method": "gmdg"},
    {"method": "full", "backbone": "resnet50", "image_size": 64},
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
        batch = cost.random_batch(images, config.image_size, "cpu")
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

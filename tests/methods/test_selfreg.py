"""SelfReg: orders that stay within classes, the projector, and the factor in front."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Beta

from patchgen.methods.selfreg import contrast, projector, shuffle_within_classes


def test_orders_keep_the_class_and_take_each_image_once() -> None:
    torch.manual_seed(0)
    target = torch.tensor([2, 0, 2, 1, 0, 2, 0, 2])
    seen = set()
    for _ in range(60):
        order = shuffle_within_classes(target)
        assert torch.equal(target[order], target) and sorted(order.tolist()) == list(range(8))
        seen.add(tuple(order.tolist()))
    assert len(seen) > 40  # of 4! 3! 1! = 144


def test_the_projector() -> None:
    layers = list(projector(8))
    assert [type(layer) for layer in layers] == [
        nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d,
    ]  # fmt: skip
    assert [m.out_features for m in layers if isinstance(m, nn.Linear)] == [16, 16, 8]
    assert not list(projector(8).buffers())
    assert projector(2048)[0].out_features == 2048


@pytest.mark.parametrize("first", ["", "patchgen+"])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_term(first: str, scale: float, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}selfreg")
    out = s.forward()
    out = out._replace(logits=scale * (out.logits + 1 - 2 * nn.functional.one_hot(s.batch.label.clamp(min=0), 3)))
    torch.manual_seed(7)
    found = s.method.losses(out, s.batch)
    target = torch.where(s.batch.label < 0, out.logits.argmax(1), s.batch.label)
    torch.manual_seed(7)
    one, other = shuffle_within_classes(target), shuffle_within_classes(target)
    share = float(Beta(0.5, 0.5).sample())
    pull = contrast(out.logits, out.features, s.method.projector(out.features), one, other, share)
    factor = min(float(found["main"].detach()), 1.0)
    assert (factor == 1.0) == (scale > 1 or float(found["main"].detach()) >= 1)
    torch.testing.assert_close(found["L_selfreg"], factor * pull)
    assert list(found)[-1] == "L_selfreg" and ("L_conf" in found) == bool(first)

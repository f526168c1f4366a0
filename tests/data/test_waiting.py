"""Nothing of a training step's input waits for the device: every copy to it is asked for without blocking."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchgen.data.augment import Augment, send
from patchgen.data.loaders import prepare
from patchgen.data.stain import Histology


class Copies(TorchDispatchMode):
    """Notes for each copy from the host to the device `meta`, which stands for an accelerator, whether it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "meta":
                self.waits.append(not kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


@pytest.mark.parametrize("augment", [Augment(), Histology()])
def test_the_input_of_a_step_waits_for_nothing(augment: Augment | Histology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # there is none for `meta`
    draw = augment.draw(4, torch.Generator().manual_seed(1))
    pixels = torch.zeros(4, 3, 28, 28, dtype=torch.uint8, device="meta")
    with Copies() as copies:
        image = prepare(pixels, draw.to("meta"), 28, (0.5,) * 3, (0.2,) * 3)
    assert image.device.type == "meta" and image.shape == (4, 3, 28, 28)
    assert len(copies.waits) >= 6 and not any(copies.waits)


def test_a_plain_copy_would_be_noticed() -> None:
    with Copies() as copies:
        torch.zeros(3).to("meta")
        send(torch.zeros(3), "meta")
    assert copies.waits == [True, False]

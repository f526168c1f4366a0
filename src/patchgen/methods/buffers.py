"""Named tensors that a method stores but never trains: a reference, a moving average."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class NamedBuffers(nn.Module):
    """A copy of named tensors that follows its method from device to device.

    Args:
        tensors: Named as in the model. A buffer's name may not contain a dot, so it is replaced by a slash.
        saved: Whether they are part of a run's saved state; tensors that ``setup`` can restore need not be.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, saved: bool) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone(), persistent=saved)

    def named(self) -> dict[str, Tensor]:
        """The tensors themselves, by the model's names."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}

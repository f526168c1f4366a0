"""Named tensors that a method carries along but never trains: a reference, a moving average."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class NamedBuffers(nn.Module):
    """A copy of named tensors that follows its method from device to device.

    Args:
        tensors: Named as the model names them. A buffer's name may not hold a dot, so a slash stands for it.
        saved: Whether a run's state holds them; what ``setup`` finds again in the same place need not be saved.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, saved: bool) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone(), persistent=saved)

    def named(self) -> dict[str, Tensor]:
        """The tensors themselves, by the model's names."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}

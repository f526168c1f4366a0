"""Hooks on a module's output or input tensor: most blocks return a tensor, those of data2vec a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def on_tensor(module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``act`` with a module's output in every pass; a tensor that it returns replaces the output."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        several = isinstance(output, tuple)
        changed = act(output[0] if several else output)
        return (changed, *output[1:]) if several and changed is not None else changed

    return module.register_forward_hook(hook)


def on_input(module: nn.Module, act: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Replace a module's first argument by ``act`` of it in every pass."""

    def hook(module: nn.Module, inputs: Any, named: Any) -> Any:
        if inputs:
            return (act(inputs[0]), *inputs[1:]), named
        first = next(iter(named))
        return inputs, {**named, first: act(named[first])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)

"""Hooks on the tensor that a module hands on or is given: most blocks return it alone, data2vec's in a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def on_tensor(module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Show ``act`` what a module says, pass after pass; a tensor that it returns goes on in its place."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        several = isinstance(output, tuple)
        changed = act(output[0] if several else output)
        return (changed, *output[1:]) if several and changed is not None else changed

    return module.register_forward_hook(hook)


def on_input(module: nn.Module, act: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Let a module read what ``act`` makes of its first argument, pass after pass."""

    def hook(module: nn.Module, inputs: Any, named: Any) -> Any:
        if inputs:
            return (act(inputs[0]), *inputs[1:]), named
        first = next(iter(named))
        return inputs, {**named, first: act(named[first])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)

"""The backbone's blocks compiled for the training passes, where a machine can do that; else nothing changes.

    compile_blocks(backbone, torch.zeros(96, 3, 224, 224), print)      # True, or one line that says why not

Compiled is what the set-up tries: passes with gradients of one shape, that of a training batch. All others run as they
are (evaluations, whose last batch is of another size), so that nothing is compiled, nor can fail, in the midst of a
run, and a resumed run computes what the unbroken one does whatever each has seen before. Parameters keep their names,
and a copy of the model is a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.model.backbone import Backbone

BACKEND = "inductor"


def compile_blocks(
    backbone: Backbone, images: Tensor, say: Callable[[str], None], *, backend: str | None = None
) -> bool:
    """Compile each block in place and try it by a forward and a backward pass; undo all of it where that fails.

    Call it in front of ``Method.setup``: hooks that wait for a training pass should not see this one.

    Args:
        backbone: Tuned as it will be trained: what learns is compiled in.
        images: (B, 3, H, W) of a training pass's shape, on its device; call it under that pass's autocast.
        say: Called with one line.
        backend: Of `torch.compile`; `BACKEND` when left out.
    """
    blocks: Sequence[nn.Module] = list(backbone.model.get_submodule(backbone.family.blocks))
    start = time.perf_counter()
    try:
        for block in blocks:
            block._compiled_call_impl = _Call(block, backend or BACKEND)
        _try(backbone, images)
    except Exception as error:  # no compiler, an operation it lacks, its own faults: each library has types of its own
        for block in blocks:
            block._compiled_call_impl = None
        say(f"--compile: {_reason(error)}; goes on without")
        return False
    say(f"--compile: {len(blocks)} blocks, {time.perf_counter() - start:.0f} s")
    return True


class _Call:
    """A block's call: compiled for passes with gradients of the first shape it meets, and plain for all others.

    Also plain under a hook, which a compiler that has met the block without it would miss.
    """

    def __init__(self, block: nn.Module, backend: str) -> None:
        self.block, self.plain = block, block._call_impl
        self.compiled = torch.compile(self.plain, backend=backend, dynamic=False)
        self.shape: torch.Size | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        shape = next(value.shape for value in (*given, *named.values()) if isinstance(value, Tensor))
        hooked = self.block._forward_hooks or self.block._forward_pre_hooks
        if hooked or not torch.is_grad_enabled() or self.shape not in (None, shape):
            return self.plain(*given, **named)
        self.shape = shape
        return self.compiled(*given, **named)


def _try(backbone: Backbone, images: Tensor) -> None:
    """Both passes, leaving no gradient and no random number behind."""
    learned = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad():
        hidden = backbone(images).patches
        if learned:
            torch.autograd.grad(hidden.float().square().mean(), learned, allow_unused=True)


def _reason(error: Exception) -> str:
    """The innermost cause in one line: a compiler wraps its errors, and adds pages to them."""
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {lines[0]}".rstrip(": ")[:200]

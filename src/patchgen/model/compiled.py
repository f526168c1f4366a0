"""`--compile`: the backbone's blocks through `torch.compile` for training passes; evaluations stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.model.backbone import Backbone

BACKEND = "inductor"


def compile_blocks(
    backbone: Backbone, images: Tensor, say: Callable[[str], None], *, backend: str | None = None
) -> bool:
    """Compile each block and try it on images (B, 3, H, W) of a training pass; if that fails, nothing changes.

    Call it before `Method.setup`, whose hooks should not see the trial.
    """
    blocks: Any = backbone.model.get_submodule(backbone.family.blocks)
    try:
        for block in blocks:
            block._compiled_call_impl = _training_call(block, backend or BACKEND)  # what `nn.Module.compile` sets
        with torch.random.fork_rng(), torch.enable_grad():
            learned = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
            loss = backbone(images).patches.float().sum()
            if learned:
                torch.autograd.grad(loss, learned, allow_unused=True)
        return True
    except Exception as error:  # no compiler, an unsupported operation: each library raises its own types
        for block in blocks:
            block._compiled_call_impl = None
        reason = getattr(error, "inner_exception", None) or error  # the compiler wraps the cause in a long report
        say(f"--compile: {type(reason).__name__}: {(str(reason).splitlines() or [''])[0][:200]}; continuing without it")
        return False


def _training_call(block: nn.Module, backend: str) -> Callable[..., Any]:
    plain = block._call_impl
    compiled = torch.compile(plain, backend=backend, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        hooked = block._forward_hooks or block._forward_pre_hooks  # compiled code would skip hooks registered later
        return (compiled if torch.is_grad_enabled() and not hooked else plain)(*args, **kwargs)

    return call

"""Where and how a model computes: its device and precision, one device behind the interface of several, `--compile`.

`SingleDevice` has the methods of `lightning_fabric.Fabric` that training and evaluation use, so the same code runs on
one device without that package, which is slow to import, and on several with it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from patchgen.common.text import first_line
from patchgen.data.augment import send

if TYPE_CHECKING:
    from patchgen.model.backbone import Backbone

T = TypeVar("T")
BACKEND = "inductor"


def find_device(accelerator: str = "auto") -> torch.device:
    """The device of `--accelerator`: `auto` is the first GPU, else Apple's, else the CPU; ValueError if not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = {"gpu": "mps" if there["mps"] else "cuda"}.get(accelerator, accelerator)
    if name == "auto":
        name = next(kind for kind, works in there.items() if works)
    if not there.get(name):
        known = [kind for kind, works in there.items() if works]
        raise ValueError(f"--accelerator must be auto or one that this machine has ({', '.join(known)}), not {name!r}")
    return torch.device("cpu") if name == "cpu" else torch.device(name, 0)


def set_matmul_precision(precision: str) -> None:
    """TF32 for the float32 products that remain beside bfloat16; exact float32 for `32-true`, on every device."""
    half = precision == "bf16-mixed"
    torch.set_float32_matmul_precision("high" if half else "highest")
    torch.backends.cudnn.allow_tf32 = half


class SingleDevice:
    """One device; precision `32-true`, or `bf16-mixed` for autocast to bfloat16."""

    world_size, global_rank, is_global_zero = 1, 0, True

    def __init__(self, accelerator: str = "auto", precision: str = "32-true") -> None:
        self.device, self.half = find_device(accelerator), precision == "bf16-mixed"

    def launch(self, work: "Callable[[SingleDevice], T]") -> T:
        return work(self)

    def setup(self, model: nn.Module) -> nn.Module:
        return _Mixed(model.to(self.device), self) if self.half else model.to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def to_device(self, tensors: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: send(tensor, self.device), tensors)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def all_reduce(self, value: Tensor, reduce_op: str = "mean") -> Tensor:
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        return value

    def barrier(self) -> None:
        pass

    def rank_zero_first(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Mixed(nn.Module):
    """Passes of a model under autocast: floats in bfloat16 go in, and float32 comes out."""

    def __init__(self, model: nn.Module, runtime: SingleDevice) -> None:
        super().__init__()
        self.model, self._runtime = model, runtime

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = convert((args, kwargs), torch.bfloat16)
        with self._runtime.autocast():
            out = self.model(*args, **kwargs)
        return convert(out, torch.float32)


def convert(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of a nested value in another dtype."""
    return tree_map_only(Tensor, lambda part: part.to(dtype) if part.is_floating_point() else part, value)


def compile_blocks(
    backbone: "Backbone", images: Tensor, say: Callable[[str], None], *, backend: str | None = None
) -> bool:
    """Compile each block for training passes, and try it on images (B, 3, H, W); if that fails, nothing changes.

    Call it before `Method.setup`, whose hooks should not see the trial.
    """
    try:
        for block in backbone.blocks:
            block._compiled_call_impl = _training_call(block, backend or BACKEND)  # what `nn.Module.compile` sets
        with torch.random.fork_rng(), torch.enable_grad():
            learned = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
            loss = backbone(images).patches.float().sum()
            if learned:
                torch.autograd.grad(loss, learned, allow_unused=True)
        return True
    except Exception as error:  # no compiler, an unsupported operation: each library raises its own types
        for block in backbone.blocks:
            block._compiled_call_impl = None
        reason = getattr(error, "inner_exception", None) or error  # the compiler wraps the cause in a long report
        say(f"--compile: {first_line(reason)}; continuing without it")
        return False


def _training_call(block: nn.Module, backend: str) -> Callable[..., Any]:
    plain = block._call_impl
    compiled = torch.compile(plain, backend=backend, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        hooked = block._forward_hooks or block._forward_pre_hooks  # compiled code would skip hooks registered later
        return (compiled if torch.is_grad_enabled() and not hooked else plain)(*args, **kwargs)

    return call

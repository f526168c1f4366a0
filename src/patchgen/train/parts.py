"""`--micro-batch`: how many images go through the network at once, and a pass over a batch in parts."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from patchgen.methods import Method
from patchgen.model.classifier import Classifier, Output, trained_tensors

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer
    from patchgen.train.lifecycle import Trainer


def images_at_once(trainer: "FoldTrainer") -> int:
    size, config = trainer.batch_size, trainer.config
    if not indivisible(trainer.method, trainer.model):
        return what_fits(trainer, size, trainer.model)
    wanted = config.images_at_once(size)
    if wanted is None or wanted >= size:
        return size
    raise ValueError(
        f"micro_batch {wanted} divides the {size} images of a step, and method {config.method!r} needs them "
        "together: it reads or changes activations inside the backbone, or compares images there; leave it out, "
        "and lower --batch-per-domain or give --precision bf16-mixed to save memory"
    )


def indivisible(method: Method, model: Classifier) -> bool:
    """Whether a pass must see the whole batch: images change each other, or a loss reads activations inside."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.backbone.modules())
    return method.whole_batch or hooked


def what_fits(trainer: "Trainer", size: int, forward: Callable[[Tensor], Output]) -> int:
    """How many of `size` images go through the network at once: as set, or on a GPU the most that fit."""
    runtime, side, wanted = trainer.fabric, trainer.config.image_size, trainer.config.images_at_once(size)

    def trial(images: int) -> None:
        """A pass of zeros forward and back, beside the optimiser's state."""
        state = [torch.empty_like(tensor) for tensor in trained_tensors(trainer.model).values() for _ in range(2)]
        with torch.random.fork_rng(), runtime.autocast():
            out = forward(torch.zeros(images, 3, side, side, device=runtime.device))
        tensors = [tensor for tensor in out if isinstance(tensor, Tensor) and tensor.requires_grad]
        torch.stack([tensor.float().sum() for tensor in tensors]).sum().backward()
        trainer.model.zero_grad()
        del state

    if wanted is None and has_limit(runtime.device):
        fits = torch.tensor(largest_part(size, trial))
        wanted = int(runtime.all_reduce(runtime.to_device(fits), reduce_op="min"))
        if wanted < size:
            trainer.say(f"micro-batch: {wanted} of the {size} images of a step fit into memory at once")
    return size if wanted is None else min(wanted, size)


def has_limit(device: torch.device) -> bool:
    """Whether the device says that its memory is full, and goes on."""
    return device.type == "cuda"


def largest_part(size: int, trial: Callable[[int], None]) -> int:
    """The largest of `size`, its half, its quarter, ... whose trial does not run out of memory."""
    while True:
        try:
            trial(size)
            return size
        except RuntimeError as error:  # torch.OutOfMemoryError, and what other devices raise
            if "out of memory" not in str(error).lower() or size == 1:
                raise
        size = -(-size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Divided(nn.Module):
    """A model whose passes go through it `in_parts` of at most `size` images."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Output:
        return in_parts(self.model, self.size, images, mask)


def in_parts(forward: Callable[..., Output], size: int, images: Tensor, other: Tensor | None) -> Output:
    """A pass in parts of at most `size` images with the gradients of the whole batch, whatever the loss compares.

    Only the outputs of a part are kept: its backward pass computes it again, with the same random numbers.
    ``other`` is the second argument of ``forward``, (B, ...) as the images.
    """
    if len(images) <= size:
        return forward(images, other)
    parts = images.split(size)
    others = [None] * len(parts) if other is None else other.split(size)
    return joined([checkpoint(forward, *each, use_reentrant=False) for each in zip(parts, others, strict=True)])


def joined(outs: Sequence[Output]) -> Output:
    """The outputs of parts as one."""
    joined: Output = tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *outs)
    return joined

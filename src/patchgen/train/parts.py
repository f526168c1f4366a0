"""`--micro-batch`: how many images go through the network at once, and the outputs of several passes as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchgen.methods import Method
from patchgen.model.classifier import Classifier, Output, trained_tensors

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer


def images_at_once(trainer: FoldTrainer) -> int | None:
    """The most images of a step that this device processes at once; None: the whole batch."""
    size, config = trainer.batch_size, trainer.config
    wanted = config.images_at_once(size)
    if wanted is not None and wanted >= size:
        return None
    if indivisible(trainer.method, trainer.model):
        if wanted is None:
            return None
        raise ValueError(
            f"micro_batch {wanted} divides the {size} images of a step, and method {config.method!r} needs them "
            "together: it reads or changes activations inside the backbone, or compares images there; leave it out, "
            "and lower --batch-per-domain or give --precision bf16-mixed to save memory"
        )
    if wanted is None:
        if trainer.fabric.device.type != "cuda":  # only a GPU says that its memory is full and goes on
            return None
        fits = largest_part(size, lambda images: _try(trainer, images))
        fits = trainer.fabric.all_reduce(trainer.fabric.to_device(torch.tensor(fits)), reduce_op="min")
        wanted = int(fits)
        if wanted < size:
            trainer.say(f"micro-batch: {wanted} of the {size} images of a step fit into memory at once")
    return wanted if wanted < size else None


def _try(trainer: FoldTrainer, images: int) -> None:
    """A pass of zeros forward and back, beside the optimiser's state."""
    side, trained = trainer.config.image_size, trained_tensors(trainer.model).values()
    state = [torch.empty_like(tensor) for tensor in trained for _ in range(2)]
    with torch.random.fork_rng(), trainer.fabric.autocast():
        out = trainer.model(torch.zeros(images, 3, side, side, device=trainer.fabric.device))
    torch.stack([tensor.float().sum() for tensor in tensors_of(out) if tensor.requires_grad]).sum().backward()
    trainer.model.zero_grad()
    del state


def is_mean(method: Method) -> bool:
    """Whether the loss is the mean of a loss of each labelled image, so that the gradients of parts add up."""
    return all(
        getattr(type(method), name) is getattr(Method, name) for name in ("losses", "weights", "watch", "update")
    )


def indivisible(method: Method, model: Classifier) -> bool:
    """Whether a pass must see the whole batch: images change each other, or a loss reads activations inside."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.backbone.modules())
    return method.whole_batch or hooked


def largest_part(size: int, trial: Callable[[int], None]) -> int:
    """The largest of `size`, its half, its quarter, ... for which a trial does not run out of memory."""
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


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """torch's default generator, and the device's if it is a GPU."""
    state = torch.get_rng_state()
    return (state, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (state,)


@contextmanager
def replayed(state: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """Draw the random numbers that followed `random_state`; afterwards the generators are as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if len(state) == 2:
            torch.cuda.set_rng_state(state[1], device)
        yield


def tensors_of(out: Output) -> list[Tensor]:
    return [tensor for tensor in (*out._replace(halves=None), *(out.halves or ())) if tensor is not None]


def joined(outs: Sequence[Output]) -> Output:
    """The outputs of parts as one; a leaf of its own wherever the last part has a gradient."""

    def join(*parts: Tensor | None) -> Any:
        if parts[-1] is None:
            return None
        return torch.cat([part.detach() for part in parts if part is not None]).requires_grad_(parts[-1].requires_grad)

    plain = [join(*field) for field in zip(*(out._replace(halves=None) for out in outs), strict=True)]
    halves = [out.halves for out in outs if out.halves is not None]
    return Output(*plain)._replace(halves=tuple(join(*half) for half in zip(*halves, strict=True)) if halves else None)

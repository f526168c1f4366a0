"""`--micro-batch`: how many images go through the network at once, and a pass over a batch in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.methods import Method
from patchgen.model.classifier import Classifier, Output, trained_tensors

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer
    from patchgen.train.lifecycle import Trainer


def images_at_once(trainer: FoldTrainer) -> int | None:
    """The most images of a step that this device processes at once; None: the whole batch."""
    size, config = trainer.batch_size, trainer.config
    wanted = config.images_at_once(size)
    if indivisible(trainer.method, trainer.model):
        if wanted is None or wanted >= size:
            return None
        raise ValueError(
            f"micro_batch {wanted} divides the {size} images of a step, and method {config.method!r} needs them "
            "together: it reads or changes activations inside the backbone, or compares images there; leave it out, "
            "and lower --batch-per-domain or give --precision bf16-mixed to save memory"
        )
    return what_fits(wanted, size, partial(try_step, trainer.model, trainer.model, config.image_size), trainer)


def what_fits(wanted: int | None, size: int, trial: Callable[[Any, int], None], trainer: Trainer) -> int | None:
    """The wanted part of `size` images, or if None the largest that fits; None: all of them.

    Args:
        trial: Raises an error of memory for a number of images that is too large.
    """
    runtime = trainer.fabric
    if wanted is None and has_limit(runtime.device):
        fits = torch.tensor(largest_part(size, partial(trial, runtime)))
        wanted = int(runtime.all_reduce(runtime.to_device(fits), reduce_op="min"))
        if wanted < size:
            trainer.say(f"micro-batch: {wanted} of the {size} images of a step fit into memory at once")
    return wanted if wanted is not None and wanted < size else None


def has_limit(device: torch.device) -> bool:
    """Whether the device says that its memory is full, and goes on."""
    return device.type == "cuda"


def try_step(model: nn.Module, forward: Callable[[Tensor], Output], side: int, runtime: Any, images: int) -> None:
    """A pass of zeros forward and back, beside the optimiser's state."""
    state = [torch.empty_like(tensor) for tensor in trained_tensors(model).values() for _ in range(2)]
    with torch.random.fork_rng(), runtime.autocast():
        out = forward(torch.zeros(images, 3, side, side, device=runtime.device))
    torch.stack([tensor.float().sum() for tensor in tensors_of(out) if tensor.requires_grad]).sum().backward()
    model.zero_grad()
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


def parts_of(count: int, size: int | None) -> list[slice]:
    """The parts of a batch of `count` images, of at most `size` each."""
    size = size or max(count, 1)
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


class DividedPass:
    """A pass in parts with the gradients of the whole batch, also for losses that compare images.

    In the first round the outputs of all parts are computed, without a graph but for the last. `out` holds them as
    leaves. In the second, `backward`, the losses give these leaves their gradients, and each part takes its share into
    the network: the last one with its graph, the others computed again with the same random numbers.

    Args:
        forward: The network's output for a part of the batch.
        runtime: Of the device, or of several.
        network: Whose gradients the devices synchronise in the last pass.
    """

    def __init__(
        self, forward: Callable[[slice], Output], parts: Sequence[slice], runtime: Any, network: nn.Module
    ) -> None:
        self._forward, self._parts, self._runtime, self._network = forward, parts, runtime, network
        self._states: list[tuple[Tensor, ...]] = []  # of the random generators before each part
        outs: list[Output] = []
        wanted = torch.is_grad_enabled()
        for part in parts:
            self._states.append(random_state(runtime.device))
            with torch.set_grad_enabled(wanted and part is parts[-1]), self._no_sync():
                outs.append(forward(part))
        self._last = outs[-1]
        self.out = joined(outs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss of `out`."""
        with self._no_sync():
            self._runtime.backward(loss)  # down to the outputs
        last = len(self._parts) - 1
        for i in (last, *range(last)):
            with self._no_sync(i != last - 1):
                if i == last:
                    out = self._last
                else:
                    with replayed(self._states[i], self._runtime.device):
                        out = self._forward(self._parts[i])
                pairs = zip(tensors_of(out), tensors_of(self.out), strict=True)
                terms = [(own * whole.grad[self._parts[i]]).sum() for own, whole in pairs if whole.grad is not None]
                self._runtime.backward(torch.stack(terms).sum())

    def _no_sync(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Gradients stay on this device."""
        return self._runtime.no_backward_sync(self._network, enabled=enabled)  # type: ignore[no-any-return]


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

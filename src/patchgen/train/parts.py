"""`--micro-batch`: how many images go through the network at once, and a pass over a batch in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.methods import Method
from patchgen.model.classifier import Classifier, Output, trained_tensors

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer
    from patchgen.train.lifecycle import Trainer


def images_at_once(trainer: FoldTrainer) -> int:
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


def what_fits(trainer: Trainer, size: int, forward: Callable[[Tensor], Output]) -> int:
    """How many of `size` images go through the network at once: as set, or on a GPU the most that fit."""
    runtime, side, wanted = trainer.fabric, trainer.config.image_size, trainer.config.images_at_once(size)

    def trial(images: int) -> None:
        """A pass of zeros forward and back, beside the optimiser's state."""
        state = [torch.empty_like(tensor) for tensor in trained_tensors(trainer.model).values() for _ in range(2)]
        with torch.random.fork_rng(), runtime.autocast():
            out = forward(torch.zeros(images, 3, side, side, device=runtime.device))
        torch.stack([tensor.float().sum() for tensor in tensors_of(out) if tensor.requires_grad]).sum().backward()
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


class DividedPass:
    """A pass over `count` images in parts of `size` with the gradients of the whole batch, whatever the loss compares.

    In the first round the outputs of all parts are computed, without a graph but for the last. `out` holds them as
    leaves. In the second, `backward`, the losses give these leaves their gradients, and each part takes its share into
    the network: the last one with its graph, the others computed again with the same random numbers. Devices
    synchronise the network's gradients in the last pass.
    """

    def __init__(
        self, forward: Callable[[slice], Output], count: int, size: int, runtime: Any, network: nn.Module
    ) -> None:
        self._forward, self._runtime, self._network = forward, runtime, network
        self._parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        self._states: list[tuple[Tensor, ...]] = []  # of the random generators before each part
        outs: list[Output] = []
        trains = torch.is_grad_enabled()
        for part in self._parts:
            self._states.append(random_state(runtime.device))
            with torch.set_grad_enabled(trains and part is self._parts[-1]), self._no_sync():
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

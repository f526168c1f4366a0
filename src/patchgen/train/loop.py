"""The training loop: batches, forward pass, losses, backward pass, optimiser's step, evaluation.

`fit` trains a fold, `take_step` makes one step, and `Step` is what a step and a method's hooks work with. Below them
are the optimiser's groups and rates, and `--micro-batch`: a pass over a batch in parts.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from patchgen.common.progress import Progress
from patchgen.data.loaders import Batch
from patchgen.methods import Method
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.device import SingleDevice
from patchgen.train.close import progress_line

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer
    from patchgen.train.lifecycle import StepValues, Trainer


def fit(trainer: "FoldTrainer") -> None:
    """Train from the trainer's first step to the last, with an evaluation every `eval_every` steps."""
    config, last = trainer.config, trainer.config.steps - 1
    title = f"{config.method}, " + (f"unseen {trainer.fold.unseen}" if trainer.fold.test else "all domains")
    with Progress(title, config.steps, trainer.start, trainer.quiet) as bar:
        clock = time.monotonic()
        for number in range(trainer.start, config.steps):
            if config.patience is not None and trainer.without_gain >= config.patience:
                bar.say(f"stopped before step {number}: {trainer.without_gain} evaluations without a better validation")
                break
            trainer.take_step(number)
            if trainer.swad:
                trainer.swad.update(trainer.predicting())
            bar.advance()
            if bar.live and trainer.values and number % 20 == 0:  # not at every step: it synchronises the device
                bar.show(float(trainer.values[-1][1].get("main", math.nan)))
            if number % config.eval_every == 0 or number == last:
                record = trainer.evaluation(number, time.monotonic() - clock)
                bar.say(progress_line(record))
                clock = time.monotonic()


def take_step(step: "Step") -> None:
    """One optimiser step of a method."""
    method = step.method
    method.begin_step(step)
    if method.update(step):  # a method may make the whole step in its own way
        return
    batch = step.batch()
    out = step.forward(batch)
    losses = method.losses(out, batch)
    step.backward(losses, method.watch(out, batch))
    method.adjust_gradients(step.model)
    step.apply()
    method.after_step(step.model)


@dataclass
class Step:
    """A step as `take_step` and a method see it."""

    method: Method
    model: Classifier
    optimizer: torch.optim.Optimizer
    read: Callable[[], Batch]  # the step's batch
    number: int = 0
    network: nn.Module | None = None  # the model, wrapped for its precision and for several devices
    runtime: Any = field(default_factory=lambda: SingleDevice("cpu"))
    mask: Callable[[Batch], Tensor | None] = lambda batch: None  # replaces the learned mask
    values: "StepValues | None" = None  # receives the named values

    def batch(self) -> Batch:
        return self.method.blend(self.read())

    def forward(self, batch: Batch) -> Output:
        """The network's output for a batch in a training pass."""
        return self.method.forward(self.network or self.model, batch, self.mask(batch))

    def backward(self, losses: dict[str, Tensor], watched: dict[str, Tensor] | None = None) -> None:
        """Sum the terms once, accumulate their gradients, and store their values for the next record."""
        require_gradients(losses, self.method.config.method)
        self.runtime.backward(torch.stack(list(losses.values())).sum())
        self.note(losses | (watched or {}))

    def note(self, values: Mapping[str, Tensor]) -> None:
        """Store values for the next record; they are not trained on."""
        if self.values is not None:
            self.values.append((self.number, {name: value.detach().clone() for name, value in values.items()}))

    def apply(self) -> None:
        """The optimiser's step."""
        if self.runtime.world_size > 1:  # DDP averages the model's gradients, but not the method's
            for parameter in self.method.parameters():
                if parameter.grad is not None:
                    parameter.grad = self.runtime.all_reduce(parameter.grad)
        if (longest := self.method.config.clip_gradients) is not None:
            trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, longest)
        set_rates(self.optimizer, self.method, self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()


def require_gradients(losses: Mapping[str, Tensor], method: str) -> None:
    """Raise ValueError for a term without gradient, which would be logged but train nothing."""
    for name, value in losses.items():
        if not value.requires_grad:
            raise ValueError(
                f"method {method!r}: the loss term {name!r} has no gradient, so it would train nothing. It comes "
                "from detached values, such as `complementary_logits` (`complementary` has a gradient), or from "
                "torch.no_grad(); return it from `watch` if it should only be logged"
            )


def plain_step(
    method: Method, model: Classifier, optimizer: torch.optim.Optimizer, batch: Batch, number: int = 0
) -> None:
    """A step on a given batch, without a trainer: for measurements and tests."""
    take_step(Step(method, model, optimizer, lambda: batch, number))


# The optimiser: separate rates for the head, the module, the tuned part of the backbone and a method's modules


def make_optimizer(model: Classifier, method: Method) -> torch.optim.Optimizer:
    config = method.config
    parts = [
        ("head", model.head, None),
        ("select", model.select, config.lr_module),
        ("backbone", model.backbone, config.lr_backbone),
        *((f"method {i}", module, rate) for i, (module, rate) in enumerate(method.rates())),
    ]
    groups = []
    for part, module, own in parts:
        params = [] if module is None else [p for p in module.parameters() if p.requires_grad]
        if params:
            rate = config.lr if own is None else own
            groups.append({"params": params, "lr": rate, "peak": rate, "name": part})
    groups = groups or [{"params": []}]  # for methods that train nothing
    kind = config.optimizer or method.optimizer
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=method.momentum, weight_decay=config.weight_decay)
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return make(groups, weight_decay=config.weight_decay)


def set_rates(optimizer: torch.optim.Optimizer, method: Method, number: int) -> None:
    """A linear warm-up to the full rate, then constant, or a cosine that would reach 0 after the last step."""
    config = method.config
    cosine, after = (config.lr_schedule or method.lr_schedule) == "cosine", number - config.warmup
    if after < 0:
        share = (number + 1) / (config.warmup + 1)
    else:
        share = (1 + math.cos(math.pi * after / (config.steps - config.warmup))) / 2 if cosine else 1.0
    if cosine or config.warmup:
        for group in optimizer.param_groups:
            group["lr"] = group.get("peak", 0.0) * share


# `--micro-batch`


def images_at_once(trainer: "FoldTrainer") -> int:
    size, config = trainer.batch_size, trainer.config
    if not indivisible(trainer.method, trainer.model):
        return what_fits(trainer, size, trainer.model)
    if (wanted := config.images_at_once(size) or size) < size:
        raise ValueError(
            f"micro_batch {wanted} divides the {size} images of a step, and method {config.method!r} needs them "
            "together: it reads or changes activations inside the backbone, or compares images there; leave it out, "
            "and lower --batch-per-domain or give --precision bf16-mixed to save memory"
        )
    return size


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
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        size = -(-size // 2)
        torch.cuda.empty_cache()  # nothing where there is no GPU


class Divided(nn.Module):
    """A model whose passes go through it `in_parts` of at most `size` images."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Output:
        return in_parts(self.model, self.size, images, mask)


def in_parts(forward: Callable[..., Output], size: int, images: Tensor, other: Tensor | None) -> Output:
    """A pass in parts of at most `size` images with the gradients of the whole batch; ``other`` (B, ...) too.

    Only the outputs of a part are kept: its backward pass computes it again, with the same random numbers.
    """
    if len(images) <= size:
        return forward(images, other)
    parts = images.split(size)
    others = [None] * len(parts) if other is None else other.split(size)
    outs = [checkpoint(forward, *each, use_reentrant=False) for each in zip(parts, others, strict=True)]
    joined: Output = tree_map(lambda *values: None if values[0] is None else torch.cat(values), *outs)
    return joined

"""The training loop: batches, forward pass, losses, backward pass, optimiser's step, evaluation.

`fit` trains a fold, `take_step` makes one step, and `Step` is what a step and a method's hooks work with. A step draws
a balanced batch, sums the method's named losses once, and updates. At an evaluation the held-out parts of the source
domains are scored, a record is written, and the whole state is saved.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.common.progress import Progress
from patchgen.data.loaders import Batch
from patchgen.methods import Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.device import SingleDevice
from patchgen.train.lifecycle import StepValues
from patchgen.train.optim import set_rates
from patchgen.train.summary import progress_line

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer


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
            if bar.live and number % 20 == 0:  # not at every step: it synchronises the device
                bar.show(trainer.values.means())
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
    values: StepValues | None = None  # receives the named values

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
            self.values.add(values, self.number)

    def forget(self) -> None:
        """Reset the optimiser state, for example when the objective changes abruptly."""
        self.optimizer.state.clear()

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

"""One optimiser step, as seen by a method: batches, gradients, and finally the optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from patchgen.data.loaders import Batch
from patchgen.model.classifier import Classifier, Output
from patchgen.train.optim import set_rates

if TYPE_CHECKING:
    from patchgen.methods import Method
    from patchgen.train.fold import FoldTrainer


class Step:
    """The argument of ``Method.update``.

    Attributes:
        number: The step's number, from 0.
        model: The classifier itself, for its parameters; call ``forward``, not the model, for a training pass.
        optimizer: Its optimiser, including the method's parameters.
    """

    def __init__(self, trainer: FoldTrainer, number: int) -> None:
        self.number, self.model, self.optimizer = number, trainer.model, trainer.optimizer
        self._trainer, self._parts = trainer, trainer.config.accumulate
        self._weights, self._weight = main_weights(trainer, number), 1.0

    def batches(self) -> Iterator[Batch]:
        """The step's micro-batches; gradients are synchronised between devices with the last of them."""
        trainer = self._trainer
        for micro in range(self._parts):
            self._weight = self._weights[micro]
            with trainer.fabric.no_backward_sync(trainer.parallel, enabled=micro < self._parts - 1):
                yield trainer.batch(self.number, micro)

    def forward(self, batch: Batch) -> Output:
        trainer = self._trainer
        mask = trainer.evaluate.given_mask(batch.index.numpy(), trainer.method.mask)
        return cast(Output, trainer.parallel(batch.image, mask=mask))

    def backward(self, losses: dict[str, Tensor], watched: dict[str, Tensor] | None = None) -> None:
        """Sum the terms once, accumulate their gradients, and store their values for the next record."""
        if self.number == self._trainer.start:
            require_gradients(losses, self._trainer.config.method)
        if self._weight != 1:
            losses = {name: self._weight * value if name == "main" else value for name, value in losses.items()}
        self._trainer.fabric.backward(torch.stack(list(losses.values())).sum() / self._parts)
        self.note(losses | (watched or {}))

    def note(self, values: dict[str, Tensor]) -> None:
        """Store values for the next record; they are not trained on."""
        self._trainer.values.add(values, self.number)

    def forget(self) -> None:
        """Reset the optimiser state, for example when the objective changes abruptly."""
        self.optimizer.state.clear()

    def apply(self) -> None:
        """The optimiser's step."""
        fabric = self._trainer.fabric
        if fabric.world_size > 1:  # DDP averages the model's gradients, but not the method's
            for parameter in self._trainer.method.parameters():
                if parameter.grad is not None:
                    parameter.grad = cast(Tensor, fabric.all_reduce(parameter.grad))
        if (longest := self._trainer.config.clip_gradients) is not None:
            trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, longest)
        set_rates(self.optimizer, self._trainer.method, self.number)
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


def main_weights(trainer: FoldTrainer, step: int) -> list[float]:
    """Weights of the micro-batches, such that the mean of their `main` is that of the step's labelled images.

    All are 1 if every image has a label, and for a `main` that a method computes within a micro-batch.
    """
    count = trainer.config.accumulate
    if count == 1 or trainer.method.replaces_main:
        return [1.0] * count
    label = trainer.batches.label[trainer.batches.rows_at(step)[0]]
    parts = (label >= 0).reshape(len(trainer.batches.rows), trainer.fabric.world_size, count, -1)
    labelled = parts.sum((0, 1, 3))  # (count,)
    return [float(weight) for weight in count * labelled / max(labelled.sum(), 1)]


class PlainStep(Step):
    """A step on a given batch, without a trainer: for measurements and tests."""

    def __init__(
        self, method: Method, model: Classifier, optimizer: torch.optim.Optimizer, batch: Batch, number: int = 0
    ) -> None:
        self.number, self.model, self.optimizer = number, model, cast(Any, optimizer)
        self._method, self._batch = method, batch

    def take(self) -> None:
        self._method.update(self)

    def batches(self) -> Iterator[Batch]:
        yield self._batch

    def forward(self, batch: Batch) -> Output:
        return cast(Output, self.model(batch.image))

    def backward(self, losses: dict[str, Tensor], watched: dict[str, Tensor] | None = None) -> None:
        require_gradients(losses, self._method.config.method)
        torch.autograd.backward(torch.stack(list(losses.values())).sum())

    def note(self, values: dict[str, Tensor]) -> None:
        """Nothing is recorded here."""

    def apply(self) -> None:
        set_rates(self.optimizer, self._method, self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()

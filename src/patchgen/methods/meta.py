"""MLDG and Fish: inner steps on some source domains, evaluated on others.

`mldg`, for each meta-train domain i paired with a meta-test domain j, in a random split of the K source domains:

    theta' = theta after one fresh Adam step on L_i
    g      = sum over the pairs of (dL_i/dtheta at theta + mldg dL_j/dtheta at theta') / K        (first order)

`meta_test` domains are used for meta-test, fewer if none would remain for meta-train; if the numbers differ, meta-test
domains are reused or left out. The optimiser then uses g.

`fish`: theta' = theta after one optimiser step on each domain in turn,  theta <- theta + fish (theta' - theta)

The run's optimiser makes these inner steps and keeps its state, as in DomainBed. L_e is the sum of all losses of the
host method on the samples of one domain, so methods with terms that compare domains, or with own steps, cannot be
added. On several devices, each domain's samples are divided and the gradients of every pass are averaged.
"""

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.method import COUNT, Method, by_domain
from patchgen.model.classifier import Classifier, trained_tensors

if TYPE_CHECKING:
    from patchgen.train.loop import Step


class DomainByDomain(Method):
    """A step of several passes, each on one domain."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        odd = [part.__name__ for part in type(self).__mro__ if _has_terms(part)]
        if len(odd) > 1:
            raise ValueError(
                f"method {config.method!r}: {' and '.join(odd)} cannot be combined, since one of them works "
                "domain by domain and the other has its own terms or steps; leave one out"
            )

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        if len(self.sources) == 1:
            raise ValueError(f"method {self.config.method!r} needs at least two source domains, and there is one")

    def gradients(self, step: "Step", batch: Batch, prefix: str = "", weight: float = 1.0) -> None:
        """Compute the gradients of the weighted losses for the trained tensors, and record the values by name."""
        step.optimizer.zero_grad()
        out = step.forward(batch)
        losses = {prefix + name: weight * value for name, value in self.losses(out, batch).items()}
        step.backward(losses, {} if prefix else self.watch(out, batch))


class Mldg(DomainByDomain):
    summary = "MLDG: a step that also helps domains it was not made on (first order)"
    reference = "Li et al., Learning to Generalize: Meta-Learning for Domain Generalization, AAAI 2018"
    addable = True
    defaults = {"mldg": 1.0, "meta_test": 2.0}
    bounds = {"meta_test": COUNT}

    def update(self, step: "Step") -> bool:
        batch = step.batch()
        domains = [rows_of(batch, rows) for rows in by_domain(batch, "cpu")]
        random = np.random.default_rng([self.config.seed, step.number])  # the same on every device
        total: dict[str, Tensor] = {}
        for train, test in meta_pairs(len(domains), int(self.hparams["meta_test"]), random):
            self._add_pair(step, domains[train], domains[test], total)
        for name, tensor in trained_tensors(step.model).items():
            tensor.grad = total[name] / len(domains) if name in total else None
        self.adjust_gradients(step.model)
        step.apply()
        self.after_step(step.model)
        return True

    def _add_pair(self, step: "Step", train: Batch, test: Batch, total: dict[str, Tensor]) -> None:
        """Add the gradient on ``train``, and the gradient on ``test`` after an inner step."""
        start = copies(step.model)
        self.gradients(step, train)
        add_gradients(step.model, total)
        torch.optim.Adam([dict(group) for group in step.optimizer.param_groups]).step()
        self.gradients(step, test, prefix="meta_", weight=self.hparams["mldg"])
        add_gradients(step.model, total)
        move(step.model, start, 0.0)


class Fish(DomainByDomain):
    summary = "Fish: moves part of the way towards the result of one step on each domain in turn"
    reference = "Shi et al., Gradient Matching for Domain Generalization, ICLR 2022"
    addable = True
    defaults = {"fish": 0.5}

    def update(self, step: "Step") -> bool:
        batch = step.batch()
        start = copies(step.model)
        for rows in by_domain(batch, "cpu"):
            self.gradients(step, rows_of(batch, rows))
            self.adjust_gradients(step.model)
            step.apply()
        move(step.model, start, self.hparams["fish"])
        self.after_step(step.model)
        return True


def _has_terms(part: type) -> bool:
    return getattr(part, "addable", False) and bool(
        {"losses", "update", "blend", "forward", "begin_step"} & vars(part).keys()
    )


def meta_pairs(count: int, num_test: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """A random split of the domains: each meta-train domain with a meta-test domain."""
    order = random.permutation(count).tolist()
    test = order[-min(num_test, count - 1) :]
    return list(zip(order[: -len(test)], itertools.cycle(test), strict=False))


def rows_of(batch: Batch, rows: Tensor) -> Batch:
    """The samples of a batch at these positions, which are on the CPU."""
    there = send(rows, batch.image.device)
    return Batch(batch.image[there], batch.label[there], batch.domain[there], batch.index[rows])


def copies(model: Classifier) -> dict[str, Tensor]:
    """Copies of the trained tensors."""
    return {name: tensor.detach().clone() for name, tensor in trained_tensors(model).items()}


def add_gradients(model: Classifier, total: dict[str, Tensor]) -> None:
    for name, tensor in trained_tensors(model).items():
        if tensor.grad is not None:
            total[name] = total[name] + tensor.grad if name in total else tensor.grad.clone()


@torch.no_grad()
def move(model: Classifier, start: dict[str, Tensor], share: float) -> None:
    """Set the trained tensors to start + share * (current - start)."""
    for name, tensor in trained_tensors(model).items():
        tensor.copy_(start[name].lerp(tensor, share))

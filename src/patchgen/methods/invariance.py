"""IRM, VREx, GroupDRO, MLDG and Fish: the risks of the source domains, or steps on them, agree.

    irm       L_irm  = w mean_e g_even g_odd,    g = dL_e / ds at s = 1 with logits s l, on each half of the domain
    vrex      L_vrex = w mean_e (L_e - mean L)^2
    groupdro  main   = sum_e q_e L_e,            q_e <- q_e exp(groupdro L_e), sum 1, before it is used
    mldg      theta' = theta after one fresh Adam step on meta-train domain i, paired with meta-test domain j
              g      = sum over the pairs of (dL_i/dtheta at theta + mldg dL_j/dtheta at theta') / K      (first order)
    fish      theta' = theta after one optimiser step on each domain in turn,  theta <- theta + fish (theta' - theta)

L_e is the cross-entropy of domain e, for `mldg` and `fish` the sum of all losses of the host method. w is 1 for the
share `anneal` of the steps, then `irm` or `vrex`; at the switch the optimiser state is reset, because it does not fit
gradients of another scale. The inner steps of `fish` change the run's optimiser state, as in DomainBed.
"""

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.method import COUNT, SHARE, Term, by_domain
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.losses import cross_entropy, mean_over_ranks

if TYPE_CHECKING:
    from patchgen.train.loop import Step


class Annealed(Term):
    """A penalty that gets its full weight only after a share of the steps."""

    defaults = {"anneal": 0.1}
    bounds = {"anneal": SHARE}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.change = int(self.hparams["anneal"] * config.steps)  # first step with the full weight
        self.full = self.change == 0

    def begin_step(self, step: "Step") -> None:
        super().begin_step(step)
        self.full = step.number >= self.change
        if step.number == self.change:
            step.optimizer.state.clear()

    def weight(self, name: str) -> float:
        return self.hparams[name] if self.full else 1.0


class Irm(Annealed):
    summary = "IRM: one scale of the logits is best for every domain"
    reference = "Arjovsky et al., Invariant Risk Minimization, 2019"
    defaults = {"irm": 100.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().losses(out, batch) | {"L_irm": self.weight("irm") * irm_penalty(out.logits, batch)}


class Vrex(Annealed):
    summary = "VREx: the domains' risks are kept equal by their variance"
    reference = "Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021"
    defaults = {"vrex": 10.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        spread = domain_risks(out.logits, batch).var(correction=0)
        return super().losses(out, batch) | {"L_vrex": self.weight("vrex") * spread}


class GroupDro(Term):
    summary = "GroupDRO: domains of high risk count more"
    reference = "Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020"
    replaces_main = True
    defaults = {"groupdro": 0.01}
    q: Tensor  # (K,), in the order of the domains' ids

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        count = max(len(self.sources), 1)
        self.register_buffer("q", torch.full((count,), 1 / count))

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        risks = domain_risks(out.logits, batch)
        rate = self.hparams["groupdro"]
        self.q = (self.q.log() + rate * risks.detach()).softmax(0)
        return super().losses(out, batch) | {"main": (self.q * risks).sum()}


def domain_risks(logits: Tensor, batch: Batch) -> Tensor:
    """L_e: (K,) cross-entropy of each source domain's labelled samples; 0 if it has none."""
    return torch.stack([cross_entropy(logits[rows], batch.label[rows]) for rows in by_domain(batch)])


def irm_penalty(logits: Tensor, batch: Batch) -> Tensor:
    """Mean over domains of the product of both halves' gradients: an unbiased estimate of the squared gradient."""
    halves = [(rows[::2], rows[1::2]) for rows in by_domain(batch)]
    slopes = [[scale_slope(logits[half], batch.label[half]) for half in pair] for pair in halves]
    return torch.stack([even * odd for even, odd in slopes]).mean()


def scale_slope(logits: Tensor, label: Tensor) -> Tensor:
    """dL/ds at s = 1 of the cross-entropy of s * logits (B, C), over the labelled samples of the global batch."""
    logits, labelled = logits.float(), label >= 0
    own = logits.gather(1, label.clamp(min=0).unsqueeze(1)).squeeze(1)  # (B,)
    slope = (logits.softmax(1) * logits).sum(1) - own
    return mean_over_ranks((slope * labelled).sum(), labelled.sum())


# Domain by domain


class DomainByDomain(Term):
    """A step of several passes, each on one domain."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        hooks = {"losses", "update", "blend", "forward", "begin_step"}
        terms = [part for part in type(self).__mro__ if getattr(part, "addable", False)]
        odd = [part.__name__ for part in terms if hooks & vars(part).keys()]
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
    defaults = {"mldg": 1.0, "meta_test": 2.0}
    bounds = {"meta_test": COUNT}

    def update(self, step: "Step") -> bool:
        batch = step.batch()
        domains = [rows_of(batch, rows) for rows in by_domain(batch, "cpu")]
        random = np.random.default_rng([self.config.seed, step.number])  # the same on every device
        total: dict[str, Tensor] = {}
        for train, test in meta_pairs(len(domains), int(self.hparams["meta_test"]), random):
            start = copies(step.model)
            self.gradients(step, domains[train])
            add_gradients(step.model, total)
            torch.optim.Adam([dict(group) for group in step.optimizer.param_groups]).step()
            self.gradients(step, domains[test], prefix="meta_", weight=self.hparams["mldg"])
            add_gradients(step.model, total)
            move(step.model, start, 0.0)
        for name, tensor in trained_tensors(step.model).items():
            tensor.grad = total[name] / len(domains) if name in total else None
        self.adjust_gradients(step.model)
        step.apply()
        self.after_step(step.model)
        return True


class Fish(DomainByDomain):
    summary = "Fish: moves part of the way towards the result of one step on each domain in turn"
    reference = "Shi et al., Gradient Matching for Domain Generalization, ICLR 2022"
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

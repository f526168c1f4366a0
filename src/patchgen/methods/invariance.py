"""IRM, VREx and GroupDRO: make the risks of the source domains similar, or emphasise the worst one.

    irm       L_irm  = w mean_e g_even g_odd,    g = dL_e / ds at s = 1 with logits s l, on each half of the domain
    vrex      L_vrex = w mean_e (L_e - mean L)^2
    groupdro  main   = sum_e q_e L_e,            q_e <- q_e exp(groupdro L_e), sum 1, before it is used

L_e is the cross-entropy of the labelled samples of source domain e; g is in closed form, mean_i [ sum_c p_ic l_ic -
l_iy ]. The weight w is 1 for the share `anneal` of the steps (500 of 5001), then `irm` or `vrex`; at the switch the
optimiser state is reset, because it does not fit gradients of a different scale. On several devices the risks are those
of the global batch.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.method import SHARE, Method, by_domain
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy, mean_over_ranks

if TYPE_CHECKING:
    from patchgen.train.loop import Step


class Annealed(Method):
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
            step.forget()

    def weight(self, name: str) -> float:
        """The penalty's weight at this step."""
        return self.hparams[name] if self.full else 1.0


class Irm(Annealed):
    summary = "IRM: one scale of the logits is best for every domain"
    reference = "Arjovsky et al., Invariant Risk Minimization, 2019"
    addable = True
    defaults = {"irm": 100.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().losses(out, batch) | {"L_irm": self.weight("irm") * irm_penalty(out.logits, batch)}


class Vrex(Annealed):
    summary = "VREx: the domains' risks are kept equal by their variance"
    reference = "Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021"
    addable = True
    defaults = {"vrex": 10.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        spread = domain_risks(out.logits, batch).var(correction=0)
        return super().losses(out, batch) | {"L_vrex": self.weight("vrex") * spread}


class GroupDro(Method):
    summary = "GroupDRO: domains of high risk count more"
    reference = "Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020"
    addable = True
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

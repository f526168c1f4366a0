"""Balance: give more weight to images that contradict their context, if the classifier recognises their class.

If the background gives away the label in 97 % of the images, the other 3 % are the only evidence against it, and
cross-entropy all but ignores them. A *context expert*, a linear layer on the mean patch token of an early block, learns
what can be predicted without selecting anything. It is trained with generalised cross-entropy, which favours the easy
majority, like the biased model of LfF (Nam et al. 2020). With b the expert's probabilities and p the classifier's,

    c_i = 1 - b_i(y_i) / max b_i                        how far image i contradicts its context, 0 to 1
    w_i = 1 + c_i p_i(y_i) max(0, s / q - 1)            its weight; q is the moving mean of c

so that contradicting images whose class the classifier recognises get the share s of the loss, where plain
cross-entropy would give them q. An image that the classifier does not recognise either is merely hard and no evidence
against the context: its weight is 1, as for images without a label, and for all images if contradictions are frequent
(q >= s). The expert is trained alongside the classifier and passes no gradient to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.method import BELOW_ONE, Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import generalized_cross_entropy, mean_over_ranks

MOMENTUM = 0.9  # of the moving mean q
LEAST = 1e-3  # lower bound of q: no weight exceeds s / LEAST, even if nothing contradicts the expert
EXPERT_Q = 0.7  # of the expert's loss


class Balance(Method):
    """Image weights for the main loss, from a context expert."""

    addable = True
    summary = "images that contradict their context count for more, as far as their class is read"
    reference = "after Nam et al. 2020 (LfF)"
    defaults: ClassVar[Mapping[str, float]] = {"share": 0.3, "expert_lr_mult": 5.0}
    bounds = {"share": BELOW_ONE}
    contradiction: Tensor

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        model.context = True
        outputs = getattr(model.head, "out_features", len(self.class_names))  # CLIP heads lack this attribute
        self.expert = nn.Linear(model.backbone.dim, outputs)
        self.register_buffer("contradiction", torch.full((), torch.nan))  # q

    def rates(self) -> list[tuple[nn.Module, float]]:
        return [*super().rates(), (self.expert, self.hparams["expert_lr_mult"] * self.config.lr)]

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        expert = generalized_cross_entropy(self._expert(out), batch.label, EXPERT_Q)
        return super().losses(out, batch) | {"expert": expert}

    @torch.no_grad()
    def weights(self, out: Output, batch: Batch) -> Tensor:
        labelled = batch.label >= 0
        belief = self._expert(out).float().softmax(-1)  # (B, C)
        own = belief.gather(1, batch.label.clamp(min=0).unsqueeze(1)).squeeze(1)
        contradicts = 1 - own / belief.amax(1)  # (B,)  c
        now = mean_over_ranks((contradicts * labelled).sum(), labelled.sum())
        mean = torch.where(self.contradiction.isnan(), now, MOMENTUM * self.contradiction + (1 - MOMENTUM) * now)
        self.contradiction.copy_(mean)
        read = out.logits.float().softmax(-1).gather(1, batch.label.clamp(min=0).unsqueeze(1)).squeeze(1)  # p(y)
        return torch.where(labelled, balanced(contradicts, read, mean, self.hparams["share"]), 1)

    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().watch(out, batch) | {"contradiction": self.contradiction}

    def _expert(self, out: Output) -> Tensor:
        assert out.context is not None  # `setup` asks for it
        expert: Tensor = self.expert(out.context)
        return expert


def balanced(contradicts: Tensor, read: Tensor, mean: Tensor, share: float) -> Tensor:
    """Weights (B,) of images with contradictions c (B,), whose mean is q, and probabilities p(y) (B,)."""
    return 1 + contradicts * read * (share / mean.clamp(min=LEAST) - 1).clamp(min=0)

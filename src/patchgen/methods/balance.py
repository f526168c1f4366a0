"""Balance: images that contradict their context count for more, as far as they are evidence against it.

Where a background gives the label away in 97 % of the images, the other 3 % are the only evidence against it, and
cross-entropy all but ignores them. A *context expert*, a linear layer on the mean patch token of an early block, learns
what can be told without selecting anything. Its generalised cross-entropy makes it believe the easy majority, as the
biased model of LfF (Nam et al. 2020). With b the expert's probabilities,

    c_i = 1 - b_i(y_i) / max b_i                        how far image i contradicts its context, 0 to 1
    w_i = (1 - c_i)(1 - s) / (1 - q) + c_i s / q        its weight; q is the moving mean of c

so that contradicting images together have the share s of the loss. Where they have it anyway (q >= s), and for images
without a label, all weights are 1. The expert learns beside the classifier and never reaches it.

A contradiction is evidence against the context only where something else in the image tells its class; otherwise the
image is merely hard, and more weight on it spoils the rest. So the weights depart from 1 as far as the classifier is
right about contradicting images: with g the moving share of c on which it is, by max(0, 2 g - 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import generalized_cross_entropy
from patchgen.model.ranks import mean_over_ranks

MOMENTUM = 0.9  # of the moving mean q
LEAST = 1e-3  # of q: no weight exceeds s / LEAST while the expert contradicts nothing
EXPERT_Q = 0.7  # of the expert's loss


class Balance(Method):
    """Weights of the main loss, from a context expert."""

    addable = True
    summary = "images that contradict their context have up to a share of the loss"
    reference = "after Nam et al. 2020 (LfF)"
    defaults: ClassVar[Mapping[str, float]] = {"share": 0.3, "expert_lr_mult": 5.0}
    contradiction: Tensor
    solved: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.hparams["share"] < 1:
            raise ValueError(f"hyper-parameter share is a share of the loss below 1, not {self.hparams['share']}")

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        model.context = True
        outputs = getattr(model.head, "out_features", len(self.class_names))  # a head of CLIP has no such number
        self.expert = nn.Linear(model.backbone.dim, outputs)
        for name in ("contradiction", "solved"):  # moving means of c, which is q, and of c where the classifier is right
            self.register_buffer(name, torch.full((), torch.nan))

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
        right = out.logits.argmax(1) == batch.label
        for moving, value in ((self.contradiction, contradicts), (self.solved, contradicts * right)):
            now = mean_over_ranks((value * labelled).sum(), labelled.sum())
            moving.copy_(torch.where(moving.isnan(), now, MOMENTUM * moving + (1 - MOMENTUM) * now))
        evidence = (2 * self._share_solved() - 1).clamp(min=0)
        weight = balanced(contradicts, self.contradiction, self.hparams["share"])
        return torch.where(labelled, 1 + evidence * (weight - 1), 1)

    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().watch(out, batch) | {"contradiction": self.contradiction, "solved": self._share_solved()}

    def _share_solved(self) -> Tensor:
        """g: how much of the contradiction the classifier resolves, 0 to 1."""
        return self.solved / self.contradiction.clamp(min=LEAST)

    def _expert(self, out: Output) -> Tensor:
        assert out.context is not None  # `setup` asks for it
        expert: Tensor = self.expert(out.context)
        return expert


def balanced(contradicts: Tensor, mean: Tensor, share: float) -> Tensor:
    """Weights (B,) that give contradictions c (B,), whose mean is q, the share s of the loss at least."""
    mean = mean.clamp(min=LEAST)
    weight = (1 - contradicts) * (1 - share) / (1 - mean) + contradicts * share / mean
    return torch.where(mean < share, weight, 1)

"""Balance, and patchgen-select: images that contradict their context get more weight if their class is recognised.

If the background gives away the label in 97 % of the images, cross-entropy all but ignores the other 3 %, the only
evidence against it. A *context expert*, a linear layer on the mean patch token of an early block, learns what can be
predicted without selecting anything, by generalised cross-entropy, which favours the easy majority (as in LfF). With b
the expert's probabilities and p the classifier's,

    c_i = 1 - b_i(y_i) / max b_i                        how far image i contradicts its context, 0 to 1
    w_i = 1 + c_i p_i(y_i) max(0, s / q - 1)            its weight; q is the moving mean of c

Contradicting images whose class is recognised get the share s of the loss, instead of q; an image that is not
recognised is merely hard. The weight is 1 without a label, and for all images if q >= s. The expert passes no gradient
to the classifier.

    patchgen-select      the class token reads what an early mask selects (`model/selector.py`)
    patchgen-attend      a variant: the published module after the backbone, with attention to the selected patches

See docs/results/selection.md for what the published mask lacks and how these were chosen.
"""

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.method import BELOW_ONE, Method, Rates
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import generalized_cross_entropy, mean_over_ranks

MOMENTUM = 0.9  # of the moving mean q
LEAST = 1e-3  # lower bound of q: no weight exceeds s / LEAST, even if nothing contradicts the expert
EXPERT_Q = 0.7  # of the expert's loss


class Balance(Method):
    addable = True
    summary = "images that contradict their context count for more, as far as their class is read"
    reference = "after Nam et al. 2020 (LfF)"
    defaults = {"share": 0.3, "expert_lr_mult": 5.0}
    bounds = {"share": BELOW_ONE}
    learned = {"expert": "expert_lr_mult"}
    contradiction: Tensor

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        model.context = True
        self.expert = nn.Linear(model.backbone.dim, model.head.out_features)
        self.register_buffer("contradiction", torch.full((), torch.nan))  # q

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        expert = generalized_cross_entropy(self._expert(out), batch.label, EXPERT_Q)
        return super().losses(out, batch) | {"expert": expert}

    @torch.no_grad()
    def weights(self, out: Output, batch: Batch) -> Tensor:
        labelled, target = batch.label >= 0, batch.label.clamp(min=0).unsqueeze(1)
        belief = self._expert(out).float().softmax(-1)  # (B, C)
        contradicts = 1 - belief.gather(1, target).squeeze(1) / belief.amax(1)  # (B,)  c
        now = mean_over_ranks((contradicts * labelled).sum(), labelled.sum())
        mean = torch.where(self.contradiction.isnan(), now, MOMENTUM * self.contradiction + (1 - MOMENTUM) * now)
        self.contradiction.copy_(mean)
        read = out.logits.float().softmax(-1).gather(1, target).squeeze(1)  # p(y)
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


class PatchGenSelect(Balance):
    pool = "select"
    small_rates = Rates(3e-3, module=1e-3)
    addable = False
    summary = "the class token reads what a mask inside the backbone selects; balanced cross-entropy"
    reference = "this project"

    @torch.no_grad()
    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().watch(out, batch) | {"mask_mean": out.selection().mean()}


class SelectTrueMask(PatchGenSelect):
    mask = "true"
    compared = False
    summary = "patchgen-select with the true mask in place of the learned one (upper bound; oracle data only)"


class PatchGenAttend(Balance, PatchGenWithoutLosses):
    attend, start = "selected", "contrast"
    small_rates = Rates(3e-3, module=3e-4)
    addable = False
    compared = False
    summary = "the published module, but its attention reads the selection; balanced cross-entropy"
    reference = "this project"

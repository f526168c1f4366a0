"""PatchGen: cross-entropy on the selected representation z+ and the three mask-shaping losses of section 4; balance.

Balance: images that contradict their context get more weight if their class is recognised. A *context expert*, a linear
layer on the mean patch token of an early block, learns by generalised cross-entropy what can be predicted without
selecting anything (docs/results/selection.md). With b its probabilities and p the classifier's,

    c_i = 1 - b_i(y_i) / max b_i                        how far image i contradicts its context, 0 to 1
    w_i = 1 + c_i p_i(y_i) max(0, s / q - 1)            its weight; q is the moving mean of c
"""

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.method import BELOW_ONE, Method, Term
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import (
    class_similarity,
    generalized_cross_entropy,
    label_probability,
    mask_suppression,
    mean_over_ranks,
    pseudo_labels,
    selected_confidence,
)

MOMENTUM = 0.9  # of the moving mean q
LEAST = 1e-3  # lower bound of q: no weight exceeds s / LEAST, even if nothing contradicts the expert
EXPERT_Q = 0.7  # of the expert's loss


class PatchGenWithoutLosses(Method):
    pool = "patchgen"
    summary = "the mask module trained by cross-entropy alone (equal-parameter control, ablation row 3.1)"

    @torch.no_grad()
    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """The complementary reference p(y | z-) of the appendix, and L_neg = p(y | z-) - p(y | z+)."""
        assert out.complementary_logits is not None  # the pool makes them
        rest = label_probability(out.complementary_logits, batch.label)
        return {
            "complementary_confidence": rest,
            "L_neg": rest - label_probability(out.logits, batch.label),
            "weak_share": (out.selection() < self.config.tau).float().mean(),
        }


class PatchGenMethod(PatchGenWithoutLosses):
    summary = "the mask module with L_ms, L_conf and L_sim (the paper's method)"

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        c, mask = self.config, out.selection()
        logits, selected = self.selected(out)
        target = pseudo_labels(out.logits, batch.label)  # B-bar of Eq. 5: unlabelled images use their arg-max
        return super().losses(out, batch) | {
            "L_ms": c.lambda_ms * mask_suppression(mask, c.tau),
            "L_conf": c.lambda_conf * selected_confidence(logits, target),
            "L_sim": c.lambda_sim * class_similarity(selected, target, logits.shape[1]),
        }

    def selected(self, out: Output) -> tuple[Tensor, Tensor]:
        """The logits of z+ (B, C), and z+ itself (B, D)."""
        return out.logits, out.features


class PatchGenCls(PatchGenMethod):
    pool = "patchgen-cls"
    summary = "PatchGen whose head reads the class token beside z+ (our extension)"
    reference = "this project"

    def selected(self, out: Output) -> tuple[Tensor, Tensor]:
        assert out.halves is not None  # the pool makes them
        return out.halves[0], out.features.chunk(2, 1)[0]


class PatchGenTrueMask(PatchGenMethod):
    mask = "true"
    compared = False
    summary = "PatchGen with the true mask in place of the learned one (upper bound; oracle data only)"

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        del terms["L_ms"]  # the true mask has no gradient
        return terms


# Balance


class Balance(Term):
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
    addable = False
    compared = False
    summary = "the published module, but its attention reads the selection; balanced cross-entropy"
    reference = "this project"

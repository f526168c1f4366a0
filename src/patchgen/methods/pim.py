"""PIM and related losses on unlabelled images.

    pim       L_pim = pim * mean over unlabelled of H(p),   L_marginal = -marginal * H(mean of p over all)
    entropy   L_marginal alone
    pim-lreg  L_pseudo = confidence * mean over unlabelled of (1 - e) CE(p, arg-max p),   e the mean predicted error,
              L_error  = mean square of (predicted - true squared error) on the labelled, for the predictor alone

`pim` is the published objective on mini-batches. The release optimises a bias-free head on frozen features with the
whole data in one batch, initialises it with k-means centres, multiplies its logits by 25, and chooses the weight of the
conditional entropy from {0.05, 0.10, ..., 1.0} by trial runs. Here the head, features and batches are the host's, and
the default weight 0.5 is the middle of that grid: 1 would be plain mutual information, and smaller values limit the
confidence in unverified predictions. It is not a tuned value.

`pim-lreg` is what L-Reg's code calls PIM, a different objective: a small network C -> C -> C (ReLU, at most 1) reads
the logits and learns the squared errors of the labelled samples. Differences from that release: the predictor is
trained by the common optimiser, after its use in the step and not before; without unlabelled samples the term is 0, not
undefined.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import mean_over_ranks

LEAST = 1e-12  # inside the logarithm


class MarginalEntropy(Method):
    summary = "keeps the mean prediction spread over all classes"
    reference = "Chiaroni et al., Parametric Information Maximization for Generalized Category Discovery, ICCV 2023"
    addable = True
    compared = False  # needs unlabelled images
    defaults = {"marginal": 1.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().losses(out, batch) | {"L_marginal": -self.hparams["marginal"] * marginal_entropy(out.logits)}


class Pim(MarginalEntropy):
    summary = "PIM: confident on each unlabelled image, spread over all classes together"
    defaults = {"pim": 0.5}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        doubt = conditional_entropy(out.logits, batch.label < 0)
        return super().losses(out, batch) | {"L_pim": self.hparams["pim"] * doubt}


class PimLReg(Method):
    summary = "pseudo-labels weighted by a learned confidence (PIM as L-Reg's code has it)"
    reference = "Tan et al., Interpret Your Decision: Logical Reasoning Regularization for Generalization, NeurIPS 2024"
    addable = True
    compared = False
    defaults = {"confidence": 0.1, "pim_lreg_lr_mult": 10.0}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.predictor = ErrorPredictor(model.head.out_features)

    def rates(self) -> list[tuple[nn.Module, float]]:
        return [*super().rates(), (self.predictor, self.config.lr * self.hparams["pim_lreg_lr_mult"])]

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        error: Tensor = self.predictor(out.logits.detach())  # (B, C)
        confidence = 1 - error.detach().mean(1)
        return super().losses(out, batch) | {
            "L_pseudo": self.hparams["confidence"] * weighted_pseudo_loss(out.logits, batch.label < 0, confidence),
            "L_error": prediction_loss(error, out.logits.detach(), batch.label),
        }


class ErrorPredictor(nn.Module):
    """Logits (B, C) -> the expected squared error of each class's probability, in [0, 1]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_classes, num_classes), nn.ReLU(), nn.Linear(num_classes, num_classes), nn.ReLU()
        )

    def forward(self, logits: Tensor) -> Tensor:
        expected: Tensor = self.layers(logits.float())
        return expected.clamp(max=1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy H of the mean prediction over the global batch."""
    probability = logits.float().softmax(1)
    mean = mean_over_ranks(probability.sum(0), torch.full((), len(logits), device=logits.device))  # (C,)
    return -(mean * (mean + LEAST).log()).sum()


def conditional_entropy(logits: Tensor, chosen: Tensor) -> Tensor:
    """Mean H(p) over the chosen samples of the global batch; 0 if there are none."""
    log_p = logits.float().log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)  # (B,)
    return mean_over_ranks((entropy * chosen).sum(), chosen.sum())


def weighted_pseudo_loss(logits: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """Mean over the chosen samples of weight (B,) times the cross-entropy with their own arg-max."""
    own = F.cross_entropy(logits.float(), logits.detach().argmax(1), reduction="none")
    return mean_over_ranks((own * weight * chosen).sum(), chosen.sum())


def prediction_loss(expected: Tensor, logits: Tensor, label: Tensor) -> Tensor:
    """Mean square of expected (B, C) minus the squared errors of the labelled samples."""
    labelled = label >= 0
    truth = (logits.float().softmax(1) - F.one_hot(label.clamp(min=0), logits.shape[1])).square()
    miss = (expected - truth).square().mean(1)  # (B,)
    return mean_over_ranks((miss * labelled).sum(), labelled.sum())

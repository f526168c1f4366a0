"""L-Reg, PIM, the entropies of predictions and SelfReg.

    lreg     A     = softmax over j of (logits^T features)_cj         (C, D), from the whole batch, labelled or not
             L_reg = lreg * ( sum_j A_j log A_j + mean_c[ -sum_j A_cj log A_cj ] ),   A_j the mean over classes
             L_ortho = ortho * mean square of (F^T F - 1)             F features of unit length; off by default
    pim      L_pim = pim * mean over unlabelled of H(p),   L_marginal = -marginal * H(mean of p over all)
    entropy  L_marginal alone
    pim-lreg L_pseudo = confidence * mean over unlabelled of (1 - e) CE(p, arg-max p),   e the mean predicted error,
             L_error  = mean square of (predicted - true squared error) on the labelled, for the predictor alone
    selfreg  L_selfreg = min(CE, 1) * [ lambda * d(a) + (1 - lambda) * d(lambda a + (1 - lambda) b) ]
             d(a)      = mean (logits - logits_a)^2 + 0.3 mean (x - P(x)_a)^2,            lambda ~ Beta(1/2, 1/2)

`pim` is the published objective with the middle of the release's grid as its weight; `pim-lreg` is what L-Reg's code
calls PIM, whose predictor is trained after its use in the step. a and b are random permutations within classes, P is a
trained projector (in DomainBed its weights are in no optimiser), and min(CE, 1) is detached.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import Term
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import mean_over_ranks, pseudo_labels, sum_over_ranks

LEAST = 1e-12  # inside the logarithms
FEATURE_SHARE = 0.3  # in SelfReg's distance
WIDEST = 2048  # of its projector
LREG = "Tan et al., Interpret Your Decision: Logical Reasoning Regularization for Generalization, NeurIPS 2024"


class LReg(Term):
    summary = "L-Reg: few feature dimensions per class, many for all classes together"
    reference = LREG
    defaults = {"lreg": 0.1, "ortho": 0.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        terms["L_reg"] = self.hparams["lreg"] * logical_regularisation(out.logits, out.features)
        if self.hparams["ortho"]:
            terms["L_ortho"] = self.hparams["ortho"] * orthogonality(out.features)
        return terms


class MarginalEntropy(Term):
    summary = "keeps the mean prediction spread over all classes"
    reference = "Chiaroni et al., Parametric Information Maximization for Generalized Category Discovery, ICCV 2023"
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


class PimLReg(Term):
    summary = "pseudo-labels weighted by a learned confidence (PIM as L-Reg's code has it)"
    reference = LREG
    compared = False
    defaults = {"confidence": 0.1, "pim_lreg_lr_mult": 10.0}
    learned = {"predictor": "pim_lreg_lr_mult"}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.predictor = ErrorPredictor(model.head.out_features)

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


def logical_regularisation(logits: Tensor, features: Tensor) -> Tensor:
    """Logits (B, C) before the softmax, features (B, D)."""
    share = sum_over_ranks(logits.float().T @ features.float()).softmax(1)  # (C, D)
    together = share.mean(0)  # (D,)
    spread = (together * (together + LEAST).log()).sum()
    focus = -((share + LEAST) * (share + LEAST).log()).sum(1).mean()
    return spread + focus


def orthogonality(features: Tensor) -> Tensor:
    """Deviation of the dimensions of unit-length features (B, D) from orthonormality."""
    unit = F.normalize(features.float(), dim=1)
    products = sum_over_ranks(unit.T @ unit)  # (D, D)
    return (products - torch.eye(len(products), device=products.device)).square().mean()


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


# SelfReg


class SelfReg(Term):
    summary = "SelfReg: logits and projected features alike within a class"
    reference = "Kim et al., SelfReg: Self-supervised Contrastive Regularization for Domain Generalization, ICCV 2021"
    learned = {"projector": ""}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.projector = projector(model.backbone.dim)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        target = pseudo_labels(out.logits, batch.label)
        one, other = shuffle_within_classes(target), shuffle_within_classes(target)
        logits, features, share = out.logits.float(), out.features.float(), float(Beta(0.5, 0.5).sample())
        pull = contrast(logits, features, self.projector(features), one, other, share)
        terms["L_selfreg"] = terms["main"].detach().clamp(max=1) * pull
        return terms


def projector(dim: int) -> nn.Sequential:
    hidden = min(2 * dim, WIDEST)
    layers: list[nn.Module] = []
    for inside, outside in ((dim, hidden), (hidden, hidden), (hidden, dim)):
        layers += [nn.Linear(inside, outside), nn.BatchNorm1d(outside, track_running_stats=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def shuffle_within_classes(target: Tensor) -> Tensor:
    """A random permutation within each class: (B,) class ids -> (B,) positions."""
    drawn = torch.randperm(len(target), device=target.device)
    by_class = target.argsort(stable=True)
    result = torch.empty_like(drawn)
    result[by_class] = drawn[target[drawn].argsort(stable=True)]  # both sides are sorted by class
    return result


def contrast(logits: Tensor, features: Tensor, projected: Tensor, one: Tensor, other: Tensor, share: float) -> Tensor:
    """The bracket of the formula above: logits (B, C), x and P(x) (B, D), permutations a and b (B,), and lambda."""

    def distance(near_logits: Tensor, near_features: Tensor) -> Tensor:
        return F.mse_loss(logits, near_logits) + FEATURE_SHARE * F.mse_loss(features, near_features)

    def mixed(values: Tensor) -> Tensor:
        return share * values[one] + (1 - share) * values[other]

    alone, together = distance(logits[one], projected[one]), distance(mixed(logits), mixed(projected))
    return share * alone + (1 - share) * together

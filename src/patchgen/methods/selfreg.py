"""SelfReg: pull together the logits, and the projected features, of images of the same class.

    L_selfreg = min(CE, 1) * [ lambda * d(a) + (1 - lambda) * d(lambda a + (1 - lambda) b) ],   lambda ~ Beta(1/2, 1/2)
    d(a)      = mean (logits - logits_a)^2 + 0.3 mean (x - P(x)_a)^2

a and b are random permutations of the batch within classes, P is a projector of three linear layers with batch
normalisation, and the first factor (detached, the method's `main`) weakens the pull once images are classified.
Images without a label use their arg-max as their class. Permutations and batch statistics are over this device's part.

Unlike in DomainBed's code the projector is trained (there its weights are in no optimiser), without running
statistics, and its hidden width is at most 2,048. The original also averages weights and decays the learning rate.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import pseudo_labels

FEATURE_SHARE = 0.3
WIDEST = 2048


class SelfReg(Method):
    summary = "SelfReg: logits and projected features alike within a class"
    reference = "Kim et al., SelfReg: Self-supervised Contrastive Regularization for Domain Generalization, ICCV 2021"
    addable = True
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
    """(B, D) -> (B, D)"""
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

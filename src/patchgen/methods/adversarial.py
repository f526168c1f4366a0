"""DANN and CDANN: a discriminator predicts the source domain from the features, which learn to mislead it.

    L_dann  = CE of the domain,   with the gradient g for the discriminator and -dann * g for the features
    L_slope = penalty * mean over images of |dCE/dx|^2,   x the discriminator's input; reversed for the features too

CDANN adds a learned class embedding to the input (part of the discriminator, not of the model), and averages the loss
within each class and then over the classes present. Images without a label use their arg-max.

DomainBed updates discriminator and features alternately with two optimisers. Here, as in the paper, one pass updates
both through a gradient reversal: the fixed points are the same and budgets stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import pseudo_labels, sum_over_ranks

WIDTH = 256


class Dann(Method):
    summary = "DANN: features from which a network cannot tell the source domains"
    reference = "Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016"
    addable = True
    moves_features = True
    defaults = {"dann": 1.0, "penalty": 0.0, "dann_lr_mult": 1.0}
    learned = {"discriminator": "dann_lr_mult"}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.discriminator = domain_network(model.backbone.dim, len(self.sources))

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        found = super().losses(out, batch)
        target = pseudo_labels(out.logits, batch.label)
        read = self.domain_input(reverse_gradient(out.features.float(), self.hparams["dann"]), target)
        told = self.discriminator(read)  # (B, K)
        each = F.cross_entropy(told, positions(batch.domain, self.sources), reduction="none")  # (B,)
        found["L_dann"] = self.domain_loss(each, target, out.logits.shape[1])
        if self.hparams["penalty"]:
            [slope] = torch.autograd.grad(each.sum(), read, create_graph=True)  # (B, D)
            found["L_slope"] = self.hparams["penalty"] * slope.square().sum(1).mean()
        return found

    def domain_input(self, features: Tensor, target: Tensor) -> Tensor:
        """The discriminator's input for features (B, D) with classes (B,)."""
        return features

    def domain_loss(self, each: Tensor, target: Tensor, num_classes: int) -> Tensor:
        """The loss from each image's CE (B,)."""
        return each.mean()


class Cdann(Dann):
    summary = "CDANN: features of a class from which a network cannot tell the source domains"
    reference = "Li et al., Deep Domain Generalization via Conditional Invariant Adversarial Networks, ECCV 2018"
    learned = {"class_vectors": "dann_lr_mult"}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.class_vectors = nn.Embedding(model.head.out_features, model.backbone.dim)

    def domain_input(self, features: Tensor, target: Tensor) -> Tensor:
        return features + cast(Tensor, self.class_vectors(target))

    def domain_loss(self, each: Tensor, target: Tensor, num_classes: int) -> Tensor:
        return mean_of_classes(each, target, num_classes)


def domain_network(dim: int, num_domains: int) -> nn.Sequential:
    """Features (B, D) -> logits of the source domains (B, K)."""
    return nn.Sequential(
        nn.Linear(dim, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_domains)
    )


def positions(domain: Tensor, sources: Sequence[int]) -> Tensor:
    """Ids of source domains (B,) -> their indices 0..K-1 among the sources."""
    return (domain.unsqueeze(1) == send(torch.tensor(sources), domain.device)).int().argmax(1)


def mean_of_classes(each: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Mean over the classes present of the mean of ``each`` (B,) within a class, over the global batch."""
    sums = sum_over_ranks(each.new_zeros(num_classes).index_add(0, target, each))  # (C,)
    counts = sum_over_ranks(torch.bincount(target, minlength=num_classes).to(each.dtype))
    return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum()


def reverse_gradient(features: Tensor, weight: float) -> Tensor:
    """The features unchanged; their gradient is multiplied by -weight."""
    return cast(Tensor, _Reversed.apply(features, weight))  # type: ignore[no-untyped-call]


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradients[0], None

"""CORAL, MMD, DANN and CDANN: features that do not tell the source domains apart.

    coral   L_coral = coral * mean over pairs of ( mean_j (m_j - m'_j)^2 + mean_ij (C_ij - C'_ij)^2 )
    mmd     L_mmd   = mmd   * mean over pairs of ( mean k(x, x) + mean k(x', x') - 2 mean k(x, x') )
    dann    L_dann  = CE of the domain,   with the gradient g for the discriminator and -dann * g for the features
            L_slope = penalty * mean over images of |dCE/dx|^2,   x the discriminator's input; reversed likewise

m and C are a domain's mean and covariance (divided by n - 1); k(a, b) = sum of exp(-g |a - b|^2) over g = 0.001, 0.01,
..., 1000, and its means include self-pairs. On several devices the statistics are those of the global batch.

CDANN adds a learned class embedding to the discriminator's input, and averages the loss within each class and then over
the classes present. Images without a label use their arg-max. DomainBed updates discriminator and features alternately
with two optimisers. Here, as in the paper, one pass updates both through a gradient reversal: the fixed points are the
same and budgets stay equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.method import Method, by_domain
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import gather_over_ranks, pseudo_labels, sum_over_ranks

GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
WIDTH = 256  # of the discriminator


class Coral(Method):
    summary = "CORAL: equal means and covariances of the source domains' features"
    reference = "Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV 2016"
    addable = True
    moves_features = True
    defaults = {"coral": 1.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        apart = mean_over_pairs(moment_distance, domain_features(out, batch))
        return super().losses(out, batch) | {"L_coral": self.hparams["coral"] * apart}


class Mmd(Method):
    summary = "MMD: the source domains' features look alike to Gaussian kernels of seven widths"
    reference = "Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018"
    addable = True
    moves_features = True
    defaults = {"mmd": 1.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        apart = mean_over_pairs(kernel_distance, domain_features(out, batch))
        return super().losses(out, batch) | {"L_mmd": self.hparams["mmd"] * apart}


def mean_over_pairs(distance: Callable[[Tensor, Tensor], Tensor], groups: list[Tensor]) -> Tensor:
    """Mean of a distance over the pairs of domains; 0 if there is only one."""
    pairs = list(itertools.combinations(groups, 2))
    if not pairs:
        return groups[0].sum() * 0
    return torch.stack([distance(one, other) for one, other in pairs]).mean()


def domain_features(out: Output, batch: Batch) -> list[Tensor]:
    """Features (n, D) of each source domain in the global batch."""
    features = out.features.float()
    return [gather_over_ranks(features[rows]) for rows in by_domain(batch)]


def moment_distance(one: Tensor, other: Tensor) -> Tensor:
    """Mean squared difference of the means plus that of the covariances, for sets (n, D) and (m, D)."""
    means = (one.mean(0) - other.mean(0)).square().mean()
    return means + (covariance(one) - covariance(other)).square().mean()


def covariance(features: Tensor) -> Tensor:
    """(n, D) -> (D, D); 0 for a single sample."""
    centred = features - features.mean(0)
    return centred.T @ centred / max(len(features) - 1, 1)


def kernel_distance(one: Tensor, other: Tensor) -> Tensor:
    """The squared distance of the kernel means of sets (n, D) and (m, D)."""
    return kernel(one, one).mean() + kernel(other, other).mean() - 2 * kernel(one, other).mean()


def kernel(one: Tensor, other: Tensor) -> Tensor:
    """Sum of Gaussian kernels: (n, D), (m, D) -> (n, m)."""
    square = one.square().sum(1).unsqueeze(1) + other.square().sum(1) - 2 * one @ other.T  # |a - b|^2
    return torch.stack([(-gamma * square.clamp(min=0)).exp() for gamma in GAMMAS]).sum(0)


# By a discriminator


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

"""CORAL, MMD, DANN, CDANN and mDSDI: features that do not tell the source domains apart.

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

mDSDI: one part of the features is domain-invariant, another domain-specific, and the head reads both.

    i = P x, s = Q x,   logits = W [i, s] + b                              (P, Q orthogonal at the start)
    L_invariant  = CE of the domain from i (three layers),   gradient reversed, times `invariant`, for P and x
    L_specific   = specific * CE of the domain from s (one layer)
    L_covariance = covariance * mean square of Cov(i, s)
    L_meta       = meta * mean over source domains d of CE_d at (Q, W, b) moved by one step on the other domains

The inner step of L_meta is a plain gradient step at `--lr`, treated as a constant (first order); the gradient of L_meta
reaches only Q, W and b. P, Q, W and b form the model's head; in `patchgen+mdsdi`, x is z+. On several devices the
covariance spans the global batch, and the inner step uses this device's part.

Differences from the released code:

- It has two backbones, for i and for s; here both are projections of one, which costs no second backbone.
- It squares each image's products i_a s_b before it averages over images, which equals |i|^2 |s|^2 / D^2 and makes both
  short, whatever their covariance. Here the average comes first.
- Its meta step is a second Adam step. Here it is a term of the single step, and `main` takes the role of meta-train.
- Its inner step is the first one of a fresh Adam, as large for tiny gradients: an easy problem was learned and then
  unlearned. Here the step shrinks with the gradient.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.method import Method, by_domain, require_linear_head
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy, gather_over_ranks, pseudo_labels, sum_over_ranks

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
    return means + (covariance(one, one) - covariance(other, other)).square().mean()


def covariance(one: Tensor, other: Tensor) -> Tensor:
    """Of the columns of two sets: (n, D), (n, E) -> (D, E); 0 for a single sample."""
    return (one - one.mean(0)).T @ (other - other.mean(0)) / max(len(one) - 1, 1)


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
        terms = super().losses(out, batch)
        target = pseudo_labels(out.logits, batch.label)
        read = self.domain_input(reverse_gradient(out.features.float(), self.hparams["dann"]), target)
        told = self.discriminator(read)  # (B, K)
        each = F.cross_entropy(told, positions(batch.domain, self.sources), reduction="none")  # (B,)
        terms["L_dann"] = self.domain_loss(each, target, out.logits.shape[1])
        if self.hparams["penalty"]:
            [slope] = torch.autograd.grad(each.sum(), read, create_graph=True)  # (B, D)
            terms["L_slope"] = self.hparams["penalty"] * slope.square().sum(1).mean()
        return terms

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


# By two parts of the features


class Mdsdi(Method):
    summary = "mDSDI: a domain-invariant and a domain-specific part of the features, kept apart"
    reference = "Bui et al., Exploiting Domain-Specific Features to Enhance Domain Generalization, NeurIPS 2021"
    addable = True
    defaults = {"invariant": 1.0, "specific": 1.0, "covariance": 1.0, "meta": 1.0}
    learned = {"adversary": "", "recogniser": ""}

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        require_linear_head(self, model)  # any other head would be lost
        model.add_module("head", TwoPartHead(model.backbone.dim, model.head.out_features))

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.adversary = domain_network(model.backbone.dim, len(self.sources))
        self.recogniser = nn.Linear(model.backbone.dim, len(self.sources))

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms, hparams = super().losses(out, batch), self.hparams
        head: Any = self.classifier.head
        features, domain = out.features.float(), positions(batch.domain, self.sources)
        invariant, specific = head.invariant(features), head.specific(features)
        told = self.adversary(reverse_gradient(invariant, hparams["invariant"]))
        terms["L_invariant"] = F.cross_entropy(told, domain)
        terms["L_specific"] = hparams["specific"] * F.cross_entropy(self.recogniser(specific), domain)
        terms["L_covariance"] = hparams["covariance"] * squared_covariance(invariant, specific)
        if hparams["meta"]:
            terms["L_meta"] = hparams["meta"] * risk_after_a_step(head, features.detach(), batch, self.config.lr)
        return terms


class TwoPartHead(nn.Module):
    """Features (B, D) -> logits (B, C) through two projections; `weight` and `bias` are those of the composition."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = dim, num_classes
        self.invariant, self.specific = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.joint = nn.Linear(2 * dim, num_classes, bias=False)
        self.bias = nn.Parameter(torch.zeros(num_classes))
        for projection in (self.invariant, self.specific):
            nn.init.orthogonal_(projection.weight)  # keeps the norm of the pretrained features

    @property
    def weight(self) -> Tensor:
        """(C, D)"""
        return self.joint.weight @ torch.cat([self.invariant.weight, self.specific.weight])

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


def squared_covariance(one: Tensor, other: Tensor) -> Tensor:
    """Mean square of the covariances between the columns of two sets (B, D), over the global batch."""
    return covariance(gather_over_ranks(one), gather_over_ranks(other)).square().mean()


def risk_after_a_step(head: TwoPartHead, features: Tensor, batch: Batch, rate: float) -> Tensor:
    """Mean over domains of a domain's CE, with a head that made a gradient step on the others.

    Its invariant projection is not changed; the features (B, D) are without gradient.
    """
    fixed = {"invariant.weight": head.invariant.weight.detach()}
    start = {name: tensor for name, tensor in head.named_parameters() if name not in fixed}
    risks = []
    groups = by_domain(batch)
    for held_out in groups:
        rest = torch.cat([held_out[:0], *(rows for rows in groups if rows is not held_out)])  # none of a single one
        risk = cross_entropy(functional_call(head, start | fixed, features[rest]), batch.label[rest])
        slopes = torch.autograd.grad(risk, list(start.values()))
        moved = {name: tensor - rate * slope for (name, tensor), slope in zip(start.items(), slopes, strict=True)}
        risks.append(cross_entropy(functional_call(head, moved | fixed, features[held_out]), batch.label[held_out]))
    return torch.stack(risks).mean()

"""CORAL, MMD, DANN, CDANN and mDSDI: features that do not tell the source domains apart.

    coral   L_coral = coral * mean over pairs of ( mean_j (m_j - m'_j)^2 + mean_ij (C_ij - C'_ij)^2 )
    mmd     L_mmd   = mmd   * mean over pairs of ( mean k(x, x) + mean k(x', x') - 2 mean k(x, x') )
    dann    L_dann  = CE of the domain,   with the gradient g for the discriminator and -dann * g for the features
            L_slope = penalty * mean over images of |dCE/dx|^2,   x the discriminator's input; reversed likewise
    cdann   the same on x + a learned vector of the class; L_dann is the mean over classes of the mean within a class
    mdsdi   i = P x, s = Q x,   logits = W [i, s] + b                              (P, Q orthogonal at the start)
            L_invariant  = CE of the domain from i (three layers),   gradient reversed, times `invariant`, for P and x
            L_specific   = specific * CE of the domain from s (one layer)
            L_covariance = covariance * mean square of Cov(i, s)
            L_meta       = meta * mean over source domains d of CE_d at (Q, W, b) moved by one step on the others

m and C are a domain's mean and covariance; k = sum of exp(-g |a - b|^2) over g = 0.001, 0.01, ..., 1000, self-pairs
included. The inner step of L_meta is a plain first-order step at `--lr`; the release's is a fresh Adam step, as large
for tiny gradients, which unlearned easy problems, and its squared i_a s_b only makes i and s short.
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
from patchgen.methods.method import Term, by_domain, require_linear_head
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy, gather_over_ranks, pseudo_labels, sum_over_ranks

GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
WIDTH = 256  # of the discriminator


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


class DomainDistance(Term):
    """The mean distance between two source domains' features in the global batch, over all pairs."""

    idle_tunes = ("head",)
    distance: Callable[[Tensor, Tensor], Tensor]
    weight: str  # the hyper-parameter

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        features = out.features.float()
        domains = [gather_over_ranks(features[rows]) for rows in by_domain(batch)]
        apart = [self.distance(one, other) for one, other in itertools.combinations(domains, 2)]
        mean = torch.stack(apart).mean() if apart else features.sum() * 0
        return super().losses(out, batch) | {f"L_{self.weight}": self.hparams[self.weight] * mean}


class Coral(DomainDistance):
    summary = "CORAL: equal means and covariances of the source domains' features"
    reference = "Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV 2016"
    weight, defaults = "coral", {"coral": 1.0}
    distance = staticmethod(moment_distance)


class Mmd(DomainDistance):
    summary = "MMD: the source domains' features look alike to Gaussian kernels of seven widths"
    reference = "Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018"
    weight, defaults = "mmd", {"mmd": 1.0}
    distance = staticmethod(kernel_distance)


# By a discriminator


class Dann(Term):
    summary = "DANN: features from which a network cannot tell the source domains"
    reference = "Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016"
    idle_tunes = ("head",)
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
        return features

    def domain_loss(self, each: Tensor, target: Tensor, num_classes: int) -> Tensor:
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
    same = features.clone()
    if same.requires_grad:
        same.register_hook(lambda gradient: -weight * gradient)
    return same.view_as(same)  # a gradient with respect to the result is not reversed


# By two parts of the features


class Mdsdi(Term):
    summary = "mDSDI: a domain-invariant and a domain-specific part of the features, kept apart"
    reference = "Bui et al., Exploiting Domain-Specific Features to Enhance Domain Generalization, NeurIPS 2021"
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
        together = covariance(gather_over_ranks(invariant), gather_over_ranks(specific))  # (D, D)
        terms["L_covariance"] = hparams["covariance"] * together.square().mean()
        if hparams["meta"]:
            terms["L_meta"] = hparams["meta"] * risk_after_a_step(head, features.detach(), batch, self.config.lr)
        return terms


class TwoPartHead(nn.Module):
    """Features (B, D) -> logits (B, C) through two projections; `weight` (C, D) is that of the composition."""

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
        return self.joint.weight @ torch.cat([self.invariant.weight, self.specific.weight])

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


def risk_after_a_step(head: TwoPartHead, features: Tensor, batch: Batch, rate: float) -> Tensor:
    """Mean over domains of a domain's CE, with a head whose other tensors than P made a gradient step on the others."""
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

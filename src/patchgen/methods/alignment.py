"""CORAL and MMD: match the feature statistics of every pair of source domains, without labels.

    coral   L_coral = coral * mean over pairs of ( mean_j (m_j - m'_j)^2 + mean_ij (C_ij - C'_ij)^2 )
    mmd     L_mmd   = mmd   * mean over pairs of ( mean k(x, x) + mean k(x', x') - 2 mean k(x, x') )

m and C are a domain's mean and covariance (divided by n - 1); k(a, b) = sum of exp(-g |a - b|^2) over g = 0.001, 0.01,
..., 1000, and its means include self-pairs. On several devices the statistics are those of the global batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method, by_domain
from patchgen.model.classifier import Output
from patchgen.model.losses import gather_over_ranks

GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


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

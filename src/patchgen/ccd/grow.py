"""A mixture with an unknown number of components: split and merge components by their evidence.

    mixture = grow(features, mixture, known=70)    # the first 70 belong to labelled classes, the others may change

"Better" is a ratio of marginal likelihoods under a conjugate prior (Normal-inverse-gamma: one variance a component),
times that of a Dirichlet process with concentration 1. PromptCCD's variant has full inverse-Wishart covariances,
accepts a tenth of the rejected moves at random, and adds children and merged means to their parents. Real classes are
not spherical: elongation counts as evidence for two components, so the number found is an order of magnitude.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from patchgen.ccd.mixture import TINY, SphericalMixture, with_replay
from patchgen.discovery.kmeans import SemiSupervisedKMeans

KAPPA = 1e-4  # prior weight, in rows, of a mean at the mean of the data; PromptCCD's value
ROUNDS = 20  # at most
MIN_ROWS = 5  # a group of this size or less is not split off; PromptCCD's value


class Groups(NamedTuple):
    """The sufficient statistics of K groups of rows (N, D), float64."""

    counts: Tensor  # (K,)
    sums: Tensor  # (K, D)
    squares: Tensor  # (K,) sum of |x|^2

    @classmethod
    def of(cls, rows: Tensor, member: Tensor, count: int) -> "Groups":
        sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, member, rows)
        squares = rows.new_zeros(count).index_add_(0, member, rows.square().sum(1))
        return cls(member.bincount(minlength=count).to(rows), sums, squares)


@dataclass(frozen=True)
class Prior:
    """Variance ~ inverse gamma worth one row of this variance; mean | variance ~ N(0, variance / KAPPA I)."""

    dim: int
    variance: float

    def evidence(self, counts: Tensor, squares: Tensor, sums_squared: Tensor) -> Tensor:
        """log p(the rows of a group), from n, sum |x|^2 and |sum x|^2; any one shape."""
        shape, scale = 0.5 * self.dim, 0.5 * self.dim * self.variance
        kappa_n, shape_n = KAPPA + counts, shape + 0.5 * self.dim * counts
        scale_n = scale + 0.5 * (squares - sums_squared / kappa_n).clamp(min=0)
        vague = 0.5 * self.dim * (kappa_n.log() - math.log(KAPPA) + counts * math.log(2 * math.pi))
        return shape_n.lgamma() - math.lgamma(shape) + shape * math.log(scale) - shape_n * scale_n.log() - vague

    def score(self, counts: Tensor, squares: Tensor, sums_squared: Tensor) -> Tensor:
        """Evidence times the Dirichlet process's (n - 1)!: two groups beat one if their scores add up to more."""
        return self.evidence(counts, squares, sums_squared) + counts.clamp(min=1).lgamma()

    def score_groups(self, groups: Groups) -> Tensor:
        return self.score(groups.counts, groups.squares, groups.sums.square().sum(1))


def grow(
    features: Tensor, mixture: SphericalMixture, *, known: int = 0, replay: Tensor | None = None, seed: int = 1
) -> SphericalMixture:
    """Split and merge components, refit to features (N, D) and replay (..., D), repeat until no move is worth it.

    The first `known` components belong to labelled classes. They keep their ids, are never split and never merged with
    each other; an unknown component may be merged into one.
    """
    rows = with_replay(features, replay)
    for _ in range(ROUNDS):
        means, splits = _moves(rows, mixture, known, seed)
        if not splits and len(means) == mixture.components:
            break
        mixture = SphericalMixture.fit(rows, len(means), start=means)
    return mixture


def _moves(rows: Tensor, mixture: SphericalMixture, known: int, seed: int) -> tuple[Tensor, int]:
    """The means (K', D) after one round, known ones first, and the number of splits."""
    member = mixture.nearest(rows, 1)[:, 0]
    origin = rows.double().mean(0)
    centred = rows.double() - origin  # the prior's means lie around 0
    groups = Groups.of(centred, member, mixture.components)
    scatter = groups.squares - groups.sums.square().sum(1) / groups.counts.clamp(min=1)  # within the components
    prior = Prior(rows.shape[1], max(float(scatter.clamp(min=0).sum() / rows.numel()), TINY))

    pairs = {c: _children(centred[member == c], prior, seed) for c in range(known, mixture.components)}
    children = {c: pair for c, pair in pairs.items() if pair is not None}
    unsplit = [c for c in range(mixture.components) if c not in children and (c < known or groups.counts[c] > 0)]
    merged = _merges(groups, prior, unsplit, known)
    means = mixture.means.double() - origin  # those of known components without rows stay
    for c in unsplit:
        parts = [c, merged[c]] if c in merged else [c]
        if groups.counts[parts].sum() > 0:
            means[c] = groups.sums[parts].sum(0) / groups.counts[parts].sum()
    remaining = means[[c for c in unsplit if c not in merged.values()]]
    return torch.cat([remaining, *children.values()]) + origin, len(children)


def _children(rows: Tensor, prior: Prior, seed: int) -> Tensor | None:
    """The means (2, D) of two halves, if these explain the rows (n, D) better than one group."""
    if len(rows) <= 2 * MIN_ROWS:
        return None
    half = SemiSupervisedKMeans(2, inits=3, seed=seed).fit(rows).assignment
    two, one = Groups.of(rows, half, 2), Groups.of(rows, torch.zeros_like(half), 1)
    better = prior.score_groups(two).sum() > prior.score_groups(one).sum()
    return two.sums / two.counts[:, None] if better and two.counts.min() > MIN_ROWS else None


def _merges(groups: Groups, prior: Prior, allowed: list[int], known: int) -> dict[int, int]:
    """Pairs {kept: given up} that one group explains better, the clearest first, each component in one pair at most."""

    def pairwise(values: Tensor) -> Tensor:
        return values[:, None] + values[None, :]

    inner = groups.sums @ groups.sums.T  # (K, K)
    together = prior.score(pairwise(groups.counts), pairwise(groups.squares), pairwise(inner.diagonal()) + 2 * inner)
    gain = (together - pairwise(prior.score_groups(groups))).tolist()
    free = {c for c in allowed if groups.counts[c] > 0}
    pairs = [(gain[i][j], i, j) for i in free for j in free if i < j and j >= known and gain[i][j] > 0]
    merged: dict[int, int] = {}
    for _, i, j in sorted(pairs, reverse=True):
        if i in free and j in free:
            merged[i] = j
            free -= {i, j}
    return merged

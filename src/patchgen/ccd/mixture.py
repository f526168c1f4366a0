"""A mixture of spherical Gaussians over unit features: the pool of prompts, of pseudo-labels and of replay.

Features are normalised (`unit`) for the fit and for every query alike: compared with means of norm 1, a vector of norm
45 is won by the widest components for every image, and all get the same prompts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.discovery.kmeans import SemiSupervisedKMeans, check_features, nearest

TINY = 1e-12  # a variance, or a share of a row, below which float64 holds only noise
CHUNK = 2**22  # entries of the largest temporary matrix: 32 MB in float64
KAPPA = 1e-4  # prior weight, in rows, of a mean at the mean of the data; PromptCCD's value
ROUNDS = 20  # at most
MIN_ROWS = 5  # a group of this size or less is not split off; PromptCCD's value


class Moments(NamedTuple):
    likelihood: float  # mean over rows
    counts: Tensor  # (K,) sum of responsibilities
    sums: Tensor  # (K, D) sum of responsibility * x
    squares: Tensor  # (K,) sum of responsibility * |x|^2


@dataclass(frozen=True, eq=False)
class SphericalMixture:
    """K Gaussians with one variance each: p(x) = sum_k w_k N(x; m_k, v_k I)."""

    means: Tensor  # (K, D), of unit vectors and hence shorter than 1
    variances: Tensor  # (K,)
    weights: Tensor  # (K,), summing to 1
    history: tuple[float, ...] = ()  # mean log-likelihood per row, at the start and after each step of EM

    @property
    def components(self) -> int:
        return self.means.shape[0]

    @classmethod
    def fit(
        cls,
        features: Tensor,
        components: int,
        *,
        start: Tensor | None = None,
        replay: Tensor | None = None,
        seed: int = 1,
        iterations: int = 100,
        tolerance: float = 1e-7,
        regularisation: float = 1e-3,
    ) -> "SphericalMixture":
        """EM on features (N, D) and `replay` (..., D), until a step gains less than `tolerance` per row.

        The regularisation is a floor of the variances: added to them, as is usual, the likelihood may fall. The means
        (K0, D) of `start` keep their ids 0..K0-1; k-means adds those that are missing.
        """
        rows, floor = with_replay(features, replay), max(regularisation, TINY)
        mixture = _around(rows, _starting_means(rows, components, start, seed), floor)
        moments = _moments(rows, mixture)
        history = [moments.likelihood]
        for _ in range(iterations):
            candidate = _maximise(moments, mixture, floor)
            moments = _moments(rows, candidate)
            gain = moments.likelihood - history[-1]
            if gain < 0:  # by rounding, at the maximum
                break
            mixture = candidate
            history.append(moments.likelihood)
            if gain < tolerance:
                break
        return replace(mixture.to(torch.float32), history=tuple(history))

    @torch.no_grad()
    def log_responsibilities(self, features: Tensor) -> Tensor:
        """log p(component | x): (N, K), float32."""
        rows = unit(features)
        return torch.cat([self.log_joint(x).log_softmax(1).float() for x in _chunks(rows, self.components)])

    @torch.no_grad()
    def log_likelihood(self, features: Tensor) -> float:
        """Mean of log p(x) over the rows."""
        return _moments(unit(features), self).likelihood

    def nearest(self, features: Tensor, k: int) -> Tensor:
        """The ids (N, k) of the k most responsible components, the first one first."""
        return self.log_responsibilities(features).topk(k, dim=1).indices

    def sample(self, per_component: int, generator: torch.Generator) -> Tensor:
        """Replay: (K, per_component, D) draws, the same number from every component however small its weight."""
        dim = self.means.shape[1]
        # of rows of length 1 around a mean m: draws with a floor above it would pull the old means towards zero
        natural = (1 - self.means.square().sum(1)).clamp(min=0) / dim  # (K,)
        spread = torch.minimum(self.variances, natural).sqrt()[:, None, None]  # (K, 1, 1)
        noise = torch.randn(self.components, per_component, dim, generator=generator, device=generator.device)
        return self.means[:, None] + spread * noise.to(self.means)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).contiguous() for name in ("means", "variances", "weights")}

    def to(self, target: torch.device | torch.dtype | str) -> "SphericalMixture":
        means, variances, weights = (tensor.to(target) for tensor in self.tensors().values())
        return SphericalMixture(means, variances, weights, self.history)

    def log_joint(self, x: Tensor) -> Tensor:
        """log w_k + log N(x; m_k, v_k I): (n, K), for rows (n, D) that are already unit and precise."""
        means, variances, weights = (part.to(x.dtype) for part in (self.means, self.variances, self.weights))
        normaliser = weights.clamp(min=TINY).log() - 0.5 * x.shape[1] * (2 * math.pi * variances).log()  # (K,)
        squares = x.square().sum(1, keepdim=True) - 2 * x @ means.T + means.square().sum(1)  # (n, K) |x - m|^2
        return normaliser - squares.clamp(min=0) / (2 * variances)


def unit(features: Tensor) -> Tensor:
    """L2-normalised rows (N, D) in float32 or float64; a check of them would synchronise the device."""
    return F.normalize(features.detach().to(torch.promote_types(features.dtype, torch.float32)), dim=1)


def with_replay(features: Tensor, replay: Tensor | None) -> Tensor:
    """Unit rows of features (N, D) and of replay (..., D), in this order."""
    rows = unit(check_features(features, "features"))
    return rows if replay is None else torch.cat([rows, unit(replay.flatten(0, -2)).to(rows)])


def _chunks(rows: Tensor, components: int) -> Iterator[Tensor]:
    """Blocks of rows in float64: memory is bounded whatever N is."""
    return (block.double() for block in rows.split(max(1, CHUNK // max(components, rows.shape[1]))))


def _moments(rows: Tensor, mixture: SphericalMixture) -> Moments:
    """The E-step (N, D) -> sums over rows."""
    totals: list[Tensor] = []
    for x in _chunks(rows, mixture.components):
        joint = mixture.log_joint(x)  # (n, K)
        share = joint.softmax(1)
        part = [joint.logsumexp(1).sum(), share.sum(0), share.T @ x, share.T @ x.square().sum(1)]
        totals = [total + new for total, new in zip(totals, part, strict=True)] if totals else part
    return Moments(float(totals[0]) / len(rows), *totals[1:])


def _maximise(moments: Moments, before: SphericalMixture, floor: float) -> SphericalMixture:
    """The M-step; a component without rows keeps its mean, with weight 0."""
    alive = moments.counts > TINY  # (K,)
    counts = moments.counts.clamp(min=TINY)
    means = torch.where(alive[:, None], moments.sums / counts[:, None], before.means)
    spread = (moments.squares / counts - means.square().sum(1)).clamp(min=0) / means.shape[1]  # (K,)
    variances = torch.where(alive, spread.clamp(min=floor), before.variances)
    return replace(before, means=means, variances=variances, weights=moments.counts / moments.counts.sum())


def _around(rows: Tensor, means: Tensor, floor: float) -> SphericalMixture:
    """Weights and variances to start with: those of the rows nearest to each mean; without any, of one row."""
    count, (components, dim) = len(rows), means.shape
    counts, errors = means.new_zeros(components), means.new_zeros(components)
    for x in _chunks(rows, components):
        distance, member = nearest(x, means)
        counts += member.bincount(minlength=components)
        errors.index_add_(0, member, distance)
    spread = torch.where(counts > 0, errors / counts.clamp(min=1), errors.sum() / count) / dim
    weights = counts.clamp(min=1) / counts.clamp(min=1).sum()
    return SphericalMixture(means, spread.clamp(min=floor), weights)


def _starting_means(rows: Tensor, components: int, start: Tensor | None, seed: int) -> Tensor:
    """The means of the start, and those that are missing from k-means around them: (K, D), float64."""
    kmeans = SemiSupervisedKMeans(components, seed=seed)
    if start is None:
        return kmeans.fit(rows).centres.double()
    means = start.to(rows.device, torch.float64)
    if len(means) == components:
        return means
    # pinned with the weight of all rows: a lighter mean wanders off to a new blob and hands its own to a new id
    copies = math.ceil(len(rows) / len(means))
    pinned, ids = means.to(rows).repeat(copies, 1), torch.arange(len(means)).repeat(copies)
    return torch.cat([means, kmeans.fit(rows, pinned, ids).centres[len(means) :].double()])


# An unknown number of components: split and merge them by their evidence, a ratio of marginal likelihoods under a
# conjugate prior (Normal-inverse-gamma: one variance a component), times that of a Dirichlet process with concentration
# 1. PromptCCD's variant has full inverse-Wishart covariances, accepts a tenth of the rejected moves at random, and adds
# children and merged means to their parents. Real classes are not spherical: elongation counts as evidence for two
# components, so the number found is an order of magnitude.


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

"""Semi-supervised k-means and the number of categories (Vaze et al., "Generalized Category Discovery", CVPR 2022).

    kmeans = SemiSupervisedKMeans(num_clusters=100).fit(unlabelled, labelled, labels)
    kmeans.assignment                # (N,) cluster of each unlabelled point; j < K_l is kmeans.labelled_classes[j]

Distances are matrix products, |x|^2 - 2xc + |c|^2, on centred points (far from the origin, digits would cancel), in
blocks of rows, so that their memory is bounded.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from patchgen.discovery.assignment import contingency, encode, hits_of

BLOCK = 1 << 20  # distances held at once
STEPS = 8  # parts into which the search divides a range; halving it would be misled by the noise of k-means


class SemiSupervisedKMeans:
    """K-means in which labelled points keep their class's cluster.

    A cluster that loses all members restarts at the farthest unlabelled point.

    Args:
        num_clusters: K, at least the number of labelled classes.
        inits: runs with newly drawn centres; the one with the lowest inertia counts.
        iterations: maximum number of steps of a run.
        tolerance: a run ends when (sum over k of |change of centre k|)^2 is at most this.
        seed: of the draws; run i of a seed is the same whatever `inits`.

    Attributes:
        centres: (K, D). The first K_l belong to the labelled classes, in sorted order.
        assignment: (N,) nearest centre of each unlabelled point.
        inertia: sum of squared distances, unlabelled to the nearest and labelled to their own centre.
        labelled_classes: the K_l ids of the first clusters.
    """

    centres: Tensor
    assignment: Tensor
    inertia: float
    labelled_classes: list[Hashable]

    def __init__(
        self, num_clusters: int, inits: int = 10, iterations: int = 200, tolerance: float = 1e-4, seed: int = 1
    ) -> None:
        self.num_clusters, self.inits, self.iterations = num_clusters, inits, iterations
        self.tolerance, self.seed = tolerance, seed

    def fit(self, unlabelled: Any, labelled: Any = None, labels: Any = None) -> Self:
        """Cluster the unlabelled points.

        Args:
            unlabelled: (N, D) tensor or array; float64 is computed in float64, all else in float32.
            labelled: (M, D), or None for plain k-means.
            labels: (M,) class ids of the labelled points, numbers or names.
        """
        points = check_features(unlabelled, "unlabelled")
        pinned, of, self.labelled_classes = _labelled(labelled, labels, points)
        known = len(self.labelled_classes)
        missing = self.num_clusters - known  # clusters that no labelled class has
        if not (known == 0) <= missing <= len(points):
            raise ValueError(
                f"num_clusters must be from {known or 1}, the number of labelled classes, to {known + len(points)}, "
                f"with another one for each unlabelled point, not {self.num_clusters}"
            )
        shift = points.mean(0, dtype=torch.float64).to(points.dtype)
        x, pinned = points - shift, pinned - shift
        sums, counts = cluster_sums(pinned, of, known)
        means = sums / counts.unsqueeze(1)
        drawn = (self._draw(x, means, missing, run) for run in range(self.inits if missing else 1))
        runs = [self._descend(x, pinned, of, torch.cat((means, others))) for others in drawn]
        centres, self.inertia = min(runs, key=lambda run: run[1])  # ties: the first
        self.centres = (centres + shift.double()).to(x.dtype)
        self.assignment = self.predict(points)
        return self

    def predict(self, x: Any) -> Tensor:
        """Nearest cluster (N,) of points (N, D)."""
        return nearest(*self._centred(x))[1]

    def distances(self, x: Any) -> Tensor:
        """Euclidean distances (N, K) of points (N, D) to the centres."""
        return torch.cdist(*self._centred(x))

    def _centred(self, x: Any) -> tuple[Tensor, Tensor]:
        """Points and centres, both shifted so that the centres are around 0."""
        points = check_features(x, "x", self.centres.shape[1]).to(self.centres)
        origin = self.centres.mean(0)
        return points - origin, self.centres - origin

    def _draw(self, x: Tensor, means: Tensor, missing: int, run: int) -> Tensor:
        """k-means++ for the missing centres (missing, D), besides the means (K_l, D) of the labelled classes."""
        rng, squares = np.random.default_rng([self.seed, run]), x.square().sum(1)
        free = torch.ones(len(x), dtype=torch.float64, device=x.device)
        weight = nearest(x, means.to(x), squares)[0] if len(means) else free
        rows: list[int] = []
        for _ in range(missing):  # rows with probability proportional to their weight
            total = (weight if weight.sum() > 0 else free).cumsum(0, dtype=torch.float64)
            row = int(torch.searchsorted(total, total[-1] * rng.random(), right=True))  # right: never one of weight 0
            row = min(row, len(x) - 1)
            rows.append(row)
            distance = nearest(x, x[row : row + 1], squares)[0]
            weight = distance if weight is free else torch.minimum(weight, distance)
            free[row] = 0
            weight = weight * (free > 0)  # rounding must not draw a point twice
        return x[rows].double()

    def _descend(self, x: Tensor, pinned: Tensor, of: Tensor, centres: Tensor) -> tuple[Tensor, float]:
        """Lloyd's steps in float64: the last centres (K, D) and the inertia; pinned points (M, D) stay in `of` (M,)."""
        squares, together = x.square().sum(1), torch.cat((pinned, x))
        for _ in range(self.iterations):
            distance, member = nearest(x, centres.to(x), squares)
            member = _fill_empty(member, distance, of, len(centres))
            before, (sums, counts) = centres, cluster_sums(together, torch.cat((of, member)), len(centres))
            centres = sums / counts.unsqueeze(1)  # no cluster is empty here
            if (centres - before).norm(dim=1).sum() ** 2 <= self.tolerance:
                break
        distance = nearest(x, centres.to(x), squares)[0]
        gaps = (pinned - centres.to(x)[of]).square()
        return centres, float(distance.sum(dtype=torch.float64) + gaps.sum(dtype=torch.float64))


def nearest(points: Tensor, centres: Tensor, squares: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Squared distance (N,) of points (N, D) around 0 to the nearest centre (K, D), and which it is; first of ties."""
    distance = points.new_empty(len(points))
    member = torch.empty(len(points), dtype=torch.int64, device=points.device)
    rows = max(1, BLOCK // len(centres))
    for first in range(0, len(points), rows):
        part = slice(first, first + rows)
        less_square = torch.addmm(centres.square().sum(1), points[part], centres.T, alpha=-2)  # |x - c|^2 - |x|^2
        torch.min(less_square, dim=1, out=(distance[part], member[part]))
    distance += points.square().sum(1) if squares is None else squares
    return distance.clamp_(min=0), member


def check_features(x: Any, name: str, width: int | None = None) -> Tensor:
    """Points (N, D) in float32 or float64, without gradient; anything else, or another `width` D, is an error."""
    points = torch.as_tensor(x).detach()
    if points.ndim != 2 or not points.numel():
        raise ValueError(f"{name} must be points of shape (N, D) with N and D at least 1, not {tuple(points.shape)}")
    if points.shape[1] != (width or points.shape[1]):
        raise ValueError(
            f"{name} has {points.shape[1]} features a point, the others {width}: use the same backbone for all"
        )
    points = points if points.dtype == torch.float64 else points.float()
    wrong = (~points.isfinite().all(1)).nonzero().flatten()
    if len(wrong):
        raise ValueError(
            f"{name} must be finite, but {len(wrong)} of {len(points)} rows hold NaN or infinity, the first is row "
            f"{int(wrong[0])}; look at the features, or leave these rows out"
        )
    return points


def _labelled(labelled: Any, labels: Any, unlabelled: Tensor) -> tuple[Tensor, Tensor, list[Hashable]]:
    """The labelled points (M, D), the position (M,) of each one's class, and the sorted classes."""
    if (labelled is None) != (labels is None):
        raise ValueError("labelled points and their labels go together: give both or neither")
    if labelled is None or not len(labelled):
        return unlabelled[:0], torch.zeros(0, dtype=torch.int64, device=unlabelled.device), []
    x = check_features(labelled, "labelled", unlabelled.shape[1]).to(unlabelled)
    codes, classes = encode(labels, "labels")
    if len(codes) != len(x):
        raise ValueError(f"labels must have one id a labelled point, {len(x)}, not {len(codes)}")
    if -1 in classes:
        raise ValueError("labels hold -1, which means 'no label': pass these points as unlabelled")
    return x, torch.from_numpy(codes).to(x.device), classes


def cluster_sums(x: Tensor, member: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum (K, D) and number (K,) of each cluster's points, float64."""
    sums = torch.zeros(num_clusters, x.shape[1], dtype=torch.float64, device=x.device)
    rows = max(1, BLOCK // x.shape[1])
    for part, of in zip(x.split(rows), member.split(rows), strict=True):
        sums.index_add_(0, of, part.double())
    return sums, member.bincount(minlength=num_clusters).double()


def _fill_empty(member: Tensor, distance: Tensor, of: Tensor, num_clusters: int) -> Tensor:
    """Give each empty cluster the farthest unlabelled point whose own cluster keeps a member."""
    sizes = torch.cat((of, member)).bincount(minlength=num_clusters)
    empty = (sizes == 0).nonzero().flatten().tolist()
    if not empty:
        return member
    member = member.clone()
    farthest_first = distance.argsort(descending=True, stable=True)
    for cluster in empty:  # there is such a point as long as N >= K - K_l
        row = farthest_first[(sizes[member[farthest_first]] > 1).nonzero()[0, 0]]
        sizes[member[row]] -= 1
        sizes[cluster] += 1
        member[row] = cluster
    return member


# The number of categories


class Estimate(NamedTuple):
    num_classes: int
    curve: dict[int, float]  # the score of every number that was tried, in ascending order


def estimate_num_classes(
    unlabelled: Any, labelled: Any, labels: Any, at_most: int, seed: int = 1, inits: int = 10
) -> Estimate:
    """The K whose plain k-means on ALL points agrees best with the labels of the labelled ones.

    No point is pinned: the labels only score (Hungarian accuracy). Merging or splitting unlabelled classes costs no
    accuracy, so the estimate is off by a few even on separated data. It assumes that unlabelled classes are as wide and
    as large as the labelled ones, and the search, from coarse to fine, can miss the best K: look at the curve.

    Args:
        unlabelled: (N, D); the classes in it may be known or new.
        labelled: (M, D) with ``labels`` (M,).
        at_most: largest K; the smallest is the number of labelled classes.
        inits: runs of each k-means.
    """
    new = check_features(unlabelled, "unlabelled")
    known = check_features(labelled, "labelled", new.shape[1])
    points = torch.cat((known.to(new), new))
    at_least = len(contingency(labels, range(len(known))).classes)  # also checks the number of labels
    if not at_least <= at_most <= len(points):
        raise ValueError(
            f"at_most must be between the number of labelled classes and the number of points, {at_least} to "
            f"{len(points)}, not {at_most}"
        )

    def score(num_classes: int) -> float:
        clusters = SemiSupervisedKMeans(num_classes, inits=inits, seed=seed).fit(points).assignment[: len(known)]
        return float(hits_of(contingency(labels, clusters).counts).sum() / len(known))

    return search(score, at_least, at_most)


def search(score: Callable[[int], float], low: int, high: int) -> Estimate:
    """The number in [low, high] of the highest score, coarse to fine; of ties the smallest, of perfect the largest."""
    curve: dict[int, float] = {}
    first, last = low, high
    while True:
        step = math.ceil((last - first) / STEPS) or 1
        for k in (*range(first, last, step), last):
            if k not in curve:
                curve[k] = score(k)
        top = max(curve.values())
        ties = [k for k, value in curve.items() if value == top]
        best = max(ties) if top == 1 else min(ties)  # merged unlabelled classes score 1 too
        if step == 1:
            return Estimate(best, dict(sorted(curve.items())))
        first, last = max(low, best - step + 1), min(high, best + step - 1)

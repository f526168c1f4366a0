"""Estimate the number of categories, by the rule of Vaze et al. ("Generalized Category Discovery", 2022)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from patchgen.discovery.assignment import contingency, hits_of
from patchgen.discovery.kmeans import SemiSupervisedKMeans, check_features

STEPS = 8  # parts into which the search divides a range; halving it would be misled by the noise of k-means


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
    """The whole number in [low, high] with the highest score, from coarse to fine: exact if the scores have one top.

    Of perfect scores (1), which merged unlabelled classes have too, the largest number wins, of others the smallest.
    """
    curve: dict[int, float] = {}
    first, last = low, high
    while True:
        step = math.ceil((last - first) / STEPS) or 1
        for k in (*range(first, last, step), last):
            if k not in curve:
                curve[k] = score(k)
        top = max(curve.values())
        ties = [k for k, value in curve.items() if value == top]
        best = max(ties) if top == 1 else min(ties)
        if step == 1:
            return Estimate(best, dict(sorted(curve.items())))
        first, last = max(low, best - step + 1), min(high, best + step - 1)

"""Select one of several methods, by the images of left-out sites that each classifies correctly.

    right = {"lp-ln": [site_a, site_b, ...], "patchgen-cls": [...]}      # (n,) bool each, the same images
    choice = choose(right, groups=[...])
    choice.chosen, choice.counted

**The rule.** Methods come simplest first, and the first is kept until a later one is better by more than chance. With
d_s the difference of accuracy at site s, on the same images, K sites and D their mean, a method is better when

    D > max(t s, z e) / sqrt(K)     s^2 = variance of the d_s, t = Student's one-sided quantile of K - 1 degrees
                                    e^2 = mean over sites of the sampling variance of d_s, due to their images

at the level 5 %, shared by all comparisons. s requires that the sites agree; e requires enough images. If patients are
named, e counts patients, not images.

**The estimate.** The score of a method that was selected for its score is optimistic. So each site counts with the
method that the same rule would select from the *other* sites only: no site influences the method that it is scored
with. This estimates the whole procedure, including the selection. With few sites it is pessimistic, because fewer sites
show less: a single one shows nothing, so with two sites each counts with the simplest method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """A later method against the one that it would replace."""

    method: str
    against: str
    difference: float  # mean over sites of the difference in accuracy
    needed: float  # the difference must exceed this
    better: int  # images that only `method` got right
    worse: int  # images that only `against` got right
    shown: bool  # the difference exceeds it


@dataclass(frozen=True)
class Choice:
    """The selected method, the comparisons, and the method that counts at each site."""

    chosen: str
    comparisons: list[Comparison]
    accuracy: dict[str, list[float]]  # method -> accuracy at each site
    counted: list[str]  # the method that each site counts with: selected on the other sites
    images: int


def choose(right: Mapping[str, Sequence[np.ndarray]], groups: Sequence[np.ndarray] | None = None) -> Choice:
    """Select a method.

    Args:
        right: Method, simplest first -> for each of K >= 2 sites (n,) bool, which of its images were right.
        groups: For each site (n,), the patient of each image.
    """
    chosen, comparisons = _keep(right, groups)
    accuracy = {name: [float(site.mean()) for site in sites] for name, sites in right.items()}
    counted = []
    for out in range(len(right[chosen])):
        others = {name: [*sites[:out], *sites[out + 1 :]] for name, sites in right.items()}
        counted.append(_keep(others, [*groups[:out], *groups[out + 1 :]] if groups else None)[0])
    return Choice(chosen, comparisons, accuracy, counted, sum(map(len, right[chosen])))


def _keep(
    right: Mapping[str, Sequence[np.ndarray]], groups: Sequence[np.ndarray] | None
) -> tuple[str, list[Comparison]]:
    """The method that the rule selects, and the comparisons."""
    names = list(right)
    kept, comparisons = names[0], []
    for name in names[1:]:
        apart = [a.astype(int) - b.astype(int) for a, b in zip(right[name], right[kept], strict=True)]
        errors = [_variance(d, groups[i] if groups else None) for i, d in enumerate(apart)]
        differences = np.array([d.mean() for d in apart])
        mean, needed = float(differences.mean()), reach(differences, errors, LEVEL / (len(names) - 1))
        better, worse = (sum(int((d == sign).sum()) for d in apart) for sign in (1, -1))
        comparisons.append(Comparison(name, kept, mean, needed, better, worse, shown=mean > needed))
        kept = name if mean > needed else kept
    return kept, comparisons


def reach(differences: np.ndarray, variances: Sequence[float], level: float = LEVEL) -> float:
    """The threshold for the mean of K differences: `differences` (K,), and the sampling variance of each."""
    from scipy.stats import norm, t

    count = len(differences)
    if count < 2:
        return math.inf  # the variation between sites is unknown
    by_images = float(norm.ppf(1 - level)) * math.sqrt(float(np.mean(variances)))
    by_sites = float(t.ppf(1 - level, count - 1) * differences.std(ddof=1))
    return max(by_sites, by_images) / math.sqrt(count)


def _variance(apart: np.ndarray, group: np.ndarray | None) -> float:
    """Variance of the mean of `apart` (n,), values -1, 0, 1.

    One image is added on either side, so that a few images that happen to agree do not give certainty. With groups, the
    images of a group count together, if that gives a larger variance.
    """
    count = len(apart) + 2
    plain = (float((apart**2).sum()) + 2 - float(apart.sum()) ** 2 / count) / count**2
    if group is None:
        return plain
    _, number = np.unique(group, return_inverse=True)
    sums = np.bincount(number, weights=apart - apart.mean())  # (G,)
    grouped = float((sums**2).sum()) / len(apart) ** 2 * len(sums) / max(1, len(sums) - 1)
    return max(plain, grouped)

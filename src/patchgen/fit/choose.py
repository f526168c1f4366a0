"""Select one of several methods, by the images of left-out sites that each classifies correctly.

**The rule.** Methods come simplest first, and the first is kept until a later one is better by more than chance. With
d_s the difference of accuracy at site s, on the same images, K sites and D their mean, a method is better when

    D > max(t s, z e) / sqrt(K)     s^2 = variance of the d_s, t = Student's one-sided quantile of K - 1 degrees
                                    e^2 = mean over sites of the sampling variance of d_s, due to their images

at the level 5 %, shared by all comparisons. s requires that the sites agree; e requires enough images. If patients are
named, e counts patients, not images.

**The estimate.** The score of a method that was selected for its score is optimistic. So each site counts with the
method that the same rule would select from the *other* sites only. This estimates the whole procedure, including the
selection, and is pessimistic with few sites: with two, each counts with the simplest method.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from patchgen.fit import expect

LEVEL = 0.05
Hits = Mapping[str, Mapping[str, np.ndarray]]  # method, simplest first -> site -> (n,) bool: which images are right


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
    accuracy: dict[str, dict[str, float]]  # method -> accuracy at each site
    counted: dict[str, str]  # the method that each site counts with: selected on the other sites
    images: int


def choose(right: Hits, groups: Mapping[str, np.ndarray] | None = None) -> Choice:
    """Select a method by the images of K >= 2 sites that it classifies right; `groups`: site -> (n,) their patients."""
    sites = list(next(iter(right.values())))
    selected, comparisons = _select(right, groups, sites)
    accuracy = {name: {site: float(hits.mean()) for site, hits in of_site.items()} for name, of_site in right.items()}
    counted = {out: _select(right, groups, [site for site in sites if site != out])[0] for out in sites}
    return Choice(selected, comparisons, accuracy, counted, sum(map(len, right[selected].values())))


def _select(right: Hits, groups: Mapping[str, np.ndarray] | None, sites: Sequence[str]) -> tuple[str, list[Comparison]]:
    """The method that the rule selects on some of the sites, and the comparisons."""
    first, *others = right
    selected, comparisons = first, list[Comparison]()
    for name in others:
        apart = [right[name][site].astype(int) - right[selected][site].astype(int) for site in sites]
        variances = [_variance(d, groups[site] if groups else None) for d, site in zip(apart, sites, strict=True)]
        differences = np.array([d.mean() for d in apart])
        mean, needed = float(differences.mean()), reach(differences, variances, LEVEL / len(others))
        better, worse = (sum(int((d == sign).sum()) for d in apart) for sign in (1, -1))
        comparisons.append(Comparison(name, selected, mean, needed, better, worse, shown=mean > needed))
        selected = name if mean > needed else selected
    return selected, comparisons


def reach(differences: np.ndarray, variances: Sequence[float], level: float = LEVEL) -> float:
    """The threshold for the mean of K differences: `differences` (K,), and the sampling variance of each."""
    if len(differences) < 2:
        return math.inf  # the variation between sites is unknown
    return expect.reach(differences, variances, 1 - level) / math.sqrt(len(differences))


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

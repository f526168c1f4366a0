"""What left-out sites say: the accuracy to expect at a new site, and which of several methods is better.

    interval    m +- r / sqrt(K)          for the mean over many sites like the K that were left out
    new_site    m +- r sqrt(1 + 1/K)      for ONE further site,   r = max(t s, z e)
    better      D > max(t s_d, z e_d) / sqrt(K)     D the mean over the sites of a later method's gain in accuracy

s is the standard deviation over the sites, t Student's quantile of K - 1 degrees; e is the sampling error of few images
(of patients, if they are named), by Laplace's rule, since sites that happen to agree are no certainty. The comparisons
share the level 5 %. Since the score of a selected method is optimistic, each site counts with the method that the
same rule would select from the *other* sites.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

COVERAGE = 0.95
LEVEL = 0.05
Hits = Mapping[str, Mapping[str, np.ndarray]]  # method, simplest first -> site -> (n,) bool: which images are right


@dataclass(frozen=True)
class Expected:
    """Accuracy at a site that training has not seen."""

    mean: float
    interval: tuple[float, float] | None  # of the mean over sites; None with fewer than two sites
    new_site: tuple[float, float] | None  # of one further site
    folds: dict[str, float]  # the accuracy at each site when it was left out

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        text = f"{self.mean:.3f}"
        if self.interval is None or self.new_site is None:
            return f"{text} (a single site: no interval for the next one)"
        (a, b), (c, d) = self.interval, self.new_site
        return (
            f"{text} (95 % t-intervals over {len(self.folds)} sites: {c:.3f} to {d:.3f} for one new site, "
            f"{a:.3f} to {b:.3f} for the mean)"
        )


def expect(folds: Mapping[str, float], images: Mapping[str, int]) -> Expected:
    """Mean and intervals of the accuracies at left-out sites, clipped to [0, 1]; `images` are the numbers scored."""
    values = np.array(list(folds.values()), dtype=float)
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return Expected(mean, None, None, dict(folds))
    counts = np.array([images[site] for site in folds], dtype=float)
    q = (values * counts + 1) / (counts + 2)
    r = reach(values, q * (1 - q) / counts, (1 + COVERAGE) / 2)
    reaches = r / math.sqrt(count), r * math.sqrt(1 + 1 / count)
    interval, new_site = ((max(0.0, mean - x), min(1.0, mean + x)) for x in reaches)
    return Expected(mean, interval, new_site, dict(folds))


def reach(values: np.ndarray, variances: Sequence[float] | np.ndarray, level: float) -> float:
    """max(t s, z e) of K values (K,) and the sampling variance of each, with one-sided quantiles of `level`."""
    from scipy.special import ndtri, stdtrit

    if len(values) < 2:
        return math.inf  # the variation between sites is unknown
    by_sites = float(stdtrit(len(values) - 1, level) * values.std(ddof=1))
    return max(by_sites, float(ndtri(level) * math.sqrt(np.mean(variances))))


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
        mean = float(differences.mean())
        needed = reach(differences, variances, 1 - LEVEL / len(others)) / math.sqrt(len(sites))
        better, worse = (sum(int((d == sign).sum()) for d in apart) for sign in (1, -1))
        comparisons.append(Comparison(name, selected, mean, needed, better, worse, shown=mean > needed))
        selected = name if mean > needed else selected
    return selected, comparisons


def _variance(apart: np.ndarray, group: np.ndarray | None) -> float:
    """Variance of the mean of `apart` (n,), -1, 0 or 1; two more images, for no certainty; of groups if larger."""
    count = len(apart) + 2
    plain = (float((apart**2).sum()) + 2 - float(apart.sum()) ** 2 / count) / count**2
    if group is None:
        return plain
    _, number = np.unique(group, return_inverse=True)
    sums = np.bincount(number, weights=apart - apart.mean())  # (G,)
    grouped = float((sums**2).sum()) / len(apart) ** 2 * len(sums) / max(1, len(sums) - 1)
    return max(plain, grouped)

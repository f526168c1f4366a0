"""Expected accuracy at a new site: each site was left out once, and the spread between them gives the error bar.

Two intervals over the K sites, from their mean m and a reach r:

    interval    m +- r / sqrt(K)          for the mean over many such sites
    new_site    m +- r sqrt(1 + 1/K)      for ONE further site, if it is drawn like these

    r = max(t s, 1.96 e)    s^2 = variance of the site accuracies, t = Student's quantile of K - 1 degrees
                            e^2 = mean over sites of q (1 - q) / n,  q = (right + 1) / (n + 2),  n images each

e is the sampling error of few images: sites whose accuracies happen to agree have s near 0, which is no certainty. q is
Laplace's rule. Neither interval covers a site of a different kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

COVERAGE = 0.95


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

    by_sites = float(stdtrit(len(values) - 1, level) * values.std(ddof=1))
    return max(by_sites, float(ndtri(level) * math.sqrt(np.mean(variances))))

"""Expected accuracy at a new site: each site was left out once, and the spread between them gives the error bar.

    expected = expect({"berlin": 0.81, "lyon": 0.74, "turin": 0.90}, {"berlin": 240, "lyon": 96, "turin": 310})
    expected.mean, expected.interval, expected.new_site

Two intervals over the K sites, from their mean m and a reach r:

    interval    m +- r / sqrt(K)          for the mean over many such sites
    new_site    m +- r sqrt(1 + 1/K)      for ONE further site, if it is drawn like these

    r = max(t s, 1.96 e)    s^2 = variance of the site accuracies, t = Student's quantile of K - 1 degrees
                            e^2 = mean over sites of q (1 - q) / n,  q = (right + 1) / (n + 2),  n images each

t s is Student's interval. e is the sampling error due to the number of images: sites whose accuracies agree, by chance
or because all are perfect, have s near 0, which does not mean certainty. q, Laplace's rule, keeps e above 0 at 0 % and
100 %; e uses a normal quantile, because the variance of counts is known and not estimated from K values.

`new_site` is the one to plan with. Neither covers a site of a different kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    reach = _reach(values, np.array([images[site] for site in folds], dtype=float))
    return Expected(
        mean, _within(mean, reach / math.sqrt(count)), _within(mean, reach * math.sqrt(1 + 1 / count)), dict(folds)
    )


def _reach(values: np.ndarray, images: np.ndarray) -> float:
    """r of the module docstring: values, images (K,)."""
    from scipy.stats import norm, t

    level = (1 + COVERAGE) / 2
    q = (values * images + 1) / (images + 2)
    counted = math.sqrt((q * (1 - q) / images).mean())
    return max(float(t.ppf(level, len(values) - 1) * values.std(ddof=1)), float(norm.ppf(level) * counted))


def _within(mean: float, reach: float) -> tuple[float, float]:
    return max(0.0, mean - reach), min(1.0, mean + reach)

"""What to expect at a new site: every site was new once, and the spread between them is the honest error bar.

    expected = expect({"berlin": 0.81, "lyon": 0.74, "turin": 0.90})
    expected.mean, expected.interval, expected.new_site

Two intervals, both of Student's t over the K sites (mean m, standard deviation s, quantile t of K - 1 degrees):

    interval    m +- t s / sqrt(K)          where the mean over many such sites lies
    new_site    m +- t s sqrt(1 + 1/K)      where ONE further site lies, if it is drawn as these were

The second is the one to plan with. Neither covers a site of another kind than these.
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


def expect(folds: Mapping[str, float]) -> Expected:
    """Mean and intervals of the accuracies at left-out sites, cut to [0, 1]."""
    values = np.array(list(folds.values()), dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Expected(mean, None, None, dict(folds))
    from scipy.stats import t

    reach = float(t.ppf((1 + COVERAGE) / 2, len(values) - 1) * values.std(ddof=1))
    count = len(values)
    return Expected(
        mean, _within(mean, reach / math.sqrt(count)), _within(mean, reach * math.sqrt(1 + 1 / count)), dict(folds)
    )


def _within(mean: float, reach: float) -> tuple[float, float]:
    return max(0.0, mean - reach), min(1.0, mean + reach)

"""95 % intervals by drawing patients again, or images where no patient is known.

    bootstrap(lambda weights: {"accuracy": float(np.average(right, weights=weights))}, patient, resamples=1000)

Images of a patient are alike, so it is patients that are drawn: all images of a patient that is drawn twice count
twice. The interval is that of the 2.5th and 97.5th percentile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

LEVEL = 0.95
SEED = 20

Statistic = Callable[[np.ndarray], Mapping[str, float | None]]  # weights (N,) -> named values; None: undefined
Interval = tuple[float, float]


def bootstrap(
    statistic: Statistic, unit: np.ndarray, resamples: int, tick: Callable[[int], None] | None = None
) -> dict[str, Interval | None]:
    """Intervals of what `statistic` gives.

    Args:
        statistic: Called with how often each image (N,) counts in a draw.
        unit: (N,) the patient of each image, as 0 .. K-1.
        resamples: Draws; 0 gives no interval.
        tick: Called with 1 after each draw.

    Returns:
        None for a value that is undefined in more than half of the draws; nothing at all with fewer than two units.
    """
    units = int(unit.max()) + 1 if len(unit) else 0
    if units < 2:
        return {}
    rng, drawn = np.random.default_rng(SEED), list[Mapping[str, float | None]]()
    for _ in range(resamples):
        times = np.bincount(rng.integers(units, size=units), minlength=units)
        drawn.append(statistic(times[unit]))
        if tick:
            tick(1)
    return {name: _interval([one[name] for one in drawn]) for name in (drawn[0] if drawn else ())}


def _interval(values: list[float | None]) -> Interval | None:
    defined = [value for value in values if value is not None]
    if 2 * len(defined) < len(values):
        return None
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)

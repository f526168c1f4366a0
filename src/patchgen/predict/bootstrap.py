"""Bootstrap 95 % intervals by resampling patients, or images if patients are unknown.

    bootstrap(lambda weights: {"accuracy": float(np.average(right, weights=weights))}, patient, resamples=1000)

Images of a patient are similar, so patients are resampled: all images of a patient that is drawn twice count twice. The
interval is between the 2.5th and 97.5th percentile.
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
    """Intervals of the values of `statistic`.

    Args:
        statistic: Called with the number of times that each image (N,) counts in a resample.
        unit: (N,) the patient of each image, as 0 .. K-1.
        resamples: Number of resamples; 0 gives no interval.
        tick: Called with 1 after each resample.

    Returns:
        None for a value that is undefined in more than half of the resamples; an empty dict with fewer than two units.
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

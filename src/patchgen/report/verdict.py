"""The conclusion of a table of methods in sentences: the best one against the others, and whether it is significant.

    for line in verdict(cells, methods, domains): print(line)
    # Best on average: lp-ln (81.4 %).
    # Against patchgen: 4 of 264 images apart, one seed: no difference shown.

The rule is that of `fit/choose.py`: the mean difference over unseen domains must exceed the variation between domains
and the sampling error of the images; the level of 5 % is shared by all comparisons. Runs record accuracies, not single
images, so the images count as unpaired, which is stricter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from patchgen.fit.choose import LEVEL, reach
from patchgen.runs.scores import Cell

SHOWN = 5  # others that are compared with the best


def verdict(cells: Sequence[Cell], methods: Sequence[str], domains: Sequence[str]) -> list[str]:
    """Sentences on the selected checkpoints, scored on the whole unseen domains; empty for fewer than two methods."""
    scored = {method: _by_domain(cells, method, domains) for method in methods}
    whole = {method: rows for method, rows in scored.items() if len(rows) == len(domains)}
    if len(whole) < 2:
        return []
    order = sorted(whole, key=lambda method: -float(np.mean([mean for mean, _ in whole[method]])))
    best, others = order[0], order[1 : SHOWN + 1]
    seeds = len({cell.seed for cell in cells})
    lines = [f"Best on average: {best} ({100 * np.mean([mean for mean, _ in whole[best]]):.1f} %)."]
    for other in others:
        lines.append(_sentence(other, whole[best], whole[other], seeds, LEVEL / (len(order) - 1)))
    return lines


def _by_domain(cells: Sequence[Cell], method: str, domains: Sequence[str]) -> list[tuple[float, int]]:
    """(mean accuracy over seeds, images) of each domain that was run."""
    mine = [c for c in cells if (c.method, c.checkpoint, c.part) == (method, "selected", "all")]
    columns = [[c for c in mine if c.unseen == domain] for domain in domains]
    return [(float(np.mean([c.accuracy for c in column])), column[0].images) for column in columns if column]


def _sentence(
    other: str, best: Sequence[tuple[float, int]], rows: Sequence[tuple[float, int]], seeds: int, level: float
) -> str:
    differences = np.array([a - b for (a, _), (b, _) in zip(best, rows, strict=True)])
    images = [n for _, n in best]
    variances = [_variance(a, n) + _variance(b, n) for (a, n), (b, _) in zip(best, rows, strict=True)]
    needed = reach(differences, variances, level)
    apart = round(float(np.dot(differences, images)))
    count = "one seed" if seeds == 1 else f"{seeds} seeds"
    text = f"Against {other}: {apart} of {sum(images):,} images apart, {count}"
    if math.isinf(needed):
        return f"{text}, one unseen domain: no difference can be shown for another."
    if differences.mean() > needed:
        return f"{text}: better by more than chance."
    return f"{text}: no difference shown ({100 * needed:.1f} points on average would be)."


def _variance(accuracy: float, images: int) -> float:
    """Variance of an accuracy; Laplace's rule keeps it above 0 at 0 and 100 %."""
    q = (accuracy * images + 1) / (images + 2)
    return q * (1 - q) / images

"""What grouping costs: an assignment pass of k-means, a step of the mixture, the Hungarian match, each beside a peer.

    cost = measure(points=20_000)
    cost["mixture"]["ratio"], cost["hungarian"]["ratio"]     # how many times longer the plain version takes

The peer of k-means forms differences by broadcasting (`benchmarks.kmeans`); that of the mixture is scikit-learn's
spherical GaussianMixture from the same means; that of the match is scipy's solver on a table that a loop over the
samples fills.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.mixture import GaussianMixture
from torch import Tensor

from benchmarks.common import Line, at_least_one, cpu_seconds, report
from benchmarks.kmeans import nearest_by_broadcast, random_features
from patchgen.ccd.mixture import SphericalMixture
from patchgen.discovery import clustering_accuracy
from patchgen.discovery.kmeans import nearest

ITERATIONS = 3  # of expectation-maximisation
SMALL = {"points": 300, "dim": 16, "classes": 5, "repeats": 1}
BLOCK_BYTES = 30e6  # that broadcasting may hold


def measure(*, points: int = 20_000, dim: int = 384, classes: int = 100, repeats: int = 3) -> dict[str, Any]:
    """Time ours and the peer in turn."""
    at_least_one(points=points, dim=dim, classes=classes, repeats=repeats)
    x, centres = (each.cpu() for each in random_features(points, dim, classes))
    rows = max(1, int(BLOCK_BYTES) // (8 * classes * dim))
    truth = np.arange(points) % classes
    found = nearest(x, centres)[1].numpy()
    rivals: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "kmeans": (lambda: nearest(x, centres), lambda: nearest_by_broadcast(x, centres, rows)),
        "mixture": (lambda: our_mixture(x, centres), lambda: plain_mixture(x, centres)),
        "hungarian": (lambda: clustering_accuracy(truth, found, range(classes)), lambda: plain_match(truth, found)),
    }
    result: dict[str, Any] = {"points": points, "dim": dim, "classes": classes, "repeats": repeats}
    for name, (ours, plain) in rivals.items():
        pairs = [(cpu_seconds(ours), cpu_seconds(plain)) for _ in range(repeats)]
        result[name] = {
            "seconds": statistics.median(own for own, _ in pairs),
            "plain_seconds": statistics.median(other for _, other in pairs),
            "ratio": statistics.median(other / max(own, 1e-9) for own, other in pairs),
        }
        report(f"{name:<9} {result[name]['seconds']:.3f} s, plain {result[name]['plain_seconds']:.3f} s")
    return result


def lines(found: dict[str, Any]) -> list[Line]:
    names = {
        "kmeans": "k-means pass / by broadcasting",
        "mixture": "mixture / scikit-learn's",
        "hungarian": "Hungarian match / counted sample by sample",
    }
    return [(f"{what}: times faster", f"{found[name]['ratio']:.1f}") for name, what in names.items()]


def our_mixture(x: Tensor, means: Tensor) -> SphericalMixture:
    return SphericalMixture.fit(x, len(means), start=means, iterations=ITERATIONS, tolerance=0)


def plain_mixture(x: Tensor, means: Tensor) -> Any:
    """scikit-learn's, from the same means, for as many steps."""
    size = dict(covariance_type="spherical", max_iter=ITERATIONS, tol=0.0, init_params="random_from_data")
    model = GaussianMixture(len(means), means_init=means.double().numpy(), random_state=0, **size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is stopped before it converges
        return model.fit(x.double().numpy())


def plain_match(truth: np.ndarray, found: np.ndarray) -> float:
    """Accuracy as the host projects count it: one Python step a sample, then the Hungarian algorithm."""
    size = int(max(truth.max(), found.max())) + 1
    counts = np.zeros((size, size), dtype=np.int64)
    for cluster, label in zip(found, truth, strict=True):
        counts[cluster, label] += 1
    row, column = linear_sum_assignment(counts.max() - counts)
    return float(counts[row, column].sum() / len(truth))

"""What one assignment pass of k-means costs: matrix products against differences formed by broadcasting.

    cost = measure(points=50_000, dim=768, clusters=100)
    cost["ratio"]["of_medians"], cost["agreement"]["same"]   # how many times slower broadcasting is; equal answers

Both give every point its nearest centre. Broadcasting forms the differences (rows, K, D) of a block of rows; the size
of that block decides much of its speed (a block that fits the processor's cache is several times faster than one of a
gigabyte), so it is an option and part of the result. The two take turns in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common import Line, at_least_one, report
from patchgen.diagnose.cost import Times, device, now
from patchgen.discovery.kmeans import nearest

TARGET = 30.0  # the smallest ratio wanted at 50,000 x 768 and K = 100
SMALL = {"points": 300, "dim": 16, "clusters": 5, "repeats": 1}
WARM_UP = 512  # points of the untimed pass
TIE = 1e-5  # distances whose relative difference is rounding in float32


def measure(
    *, points: int = 50_000, dim: int = 768, clusters: int = 100, repeats: int = 3, chunk_mb: int = 1000
) -> dict[str, Any]:
    """Time an assignment pass by matrix products and by broadcasting over all points, and compare the answers.

    Args:
        points: N, rows of random features.
        dim: D, features per point.
        clusters: K, centres.
        repeats: Timed passes of each, in turn, after a short one that warms up.
        chunk_mb: Megabytes that broadcasting may hold: differences and their squares.
    """
    settings = {"points": points, "dim": dim, "clusters": clusters, "repeats": repeats, "chunk_mb": chunk_mb}
    at_least_one(**settings)
    x, centres = random_features(points, dim, clusters)
    rows = min(points, max(1, int(chunk_mb * 1e6) // (2 * 4 * clusters * dim)))
    rivals: dict[str, Callable[[Tensor], Tensor]] = {
        "matmul": lambda part: nearest(part, centres)[1],
        "broadcast": lambda part: nearest_by_broadcast(part, centres, rows),
    }
    times, answers = _race(rivals, x, repeats)
    return settings | {
        "chunk_rows": rows,
        "machine": {"device": str(x.device), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "passes": {
            name: {
                "median_seconds": statistics.median(taken.wall),
                "fastest_seconds": min(taken.wall),
                "median_cpu_seconds": statistics.median(taken.cpu),
                "seconds": taken.wall,
                "cpu_seconds": taken.cpu,
            }
            for name, taken in times.items()
        },
        "ratio": compare(times["broadcast"], times["matmul"]),
        "agreement": agreement(x, centres, answers["matmul"], answers["broadcast"]),
    }


def lines(found: dict[str, Any]) -> list[Line]:
    ratio, agreement = found["ratio"], found["agreement"]
    size = f"{found['points']:,} x {found['dim']} points, {found['clusters']} centres"
    block = f"blocks of {found['chunk_rows']:,} rows, {found['chunk_mb']:,} MB"
    scatter = f"{ratio['of_medians']:.1f} ({ratio['lowest']:.1f}-{ratio['highest']:.1f})"
    equal = f"{agreement['same']:,} of {found['points']:,}, {agreement['ties']} ties, {agreement['wrong']} wrong"
    return [
        *((f"{size}: {name}, median s", f"{each['median_seconds']:.3f}") for name, each in found["passes"].items()),
        (f"broadcast ({block}) / matmul", scatter, f">= {TARGET:g}", ratio["reached"]),
        ("broadcast / matmul, processor seconds", f"{ratio['of_cpu_medians']:.1f}"),
        ("same centre for both", equal),
    ]


def compare(slow: Times, fast: Times) -> dict[str, Any]:
    """How many times longer `slow` takes; lowest and highest are those of passes that were neighbours in time."""
    pairs = np.divide(slow.wall, fast.wall)
    of_medians = statistics.median(slow.wall) / statistics.median(fast.wall)
    return {
        "of_medians": of_medians,
        "lowest": float(pairs.min()),
        "highest": float(pairs.max()),
        "of_fastest": min(slow.wall) / min(fast.wall),
        "of_cpu_medians": statistics.median(slow.cpu) / max(statistics.median(fast.cpu), 1e-9),
        "target": TARGET,
        "reached": of_medians >= TARGET,
    }


def agreement(x: Tensor, centres: Tensor, one: Tensor, other: Tensor) -> dict[str, Any]:
    """Points with the same centre in both answers; `ties` differ, but their two distances agree to rounding."""
    differ = (one != other).nonzero().flatten()
    gaps = [(x[differ].double() - centres[answer[differ]].double()).norm(dim=1) for answer in (one, other)]
    ties = int(((gaps[0] - gaps[1]).abs() <= TIE * gaps[0]).sum())
    return {"same": len(x) - len(differ), "ties": ties, "wrong": len(differ) - ties}


def nearest_by_broadcast(x: Tensor, centres: Tensor, rows: int) -> Tensor:
    """The obvious version: nearest centre (N,) from the differences (rows, K, D) of one block of rows after another."""
    return torch.cat([(block.unsqueeze(1) - centres.unsqueeze(0)).pow(2).sum(2).argmin(1) for block in x.split(rows)])


def random_features(points: int, dim: int, clusters: int) -> tuple[Tensor, Tensor]:
    """Unit vectors (N, D) around unit centres (K, D), as L2-normalised image features lie."""
    generator = torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(clusters, dim, generator=generator))
    noise = torch.randn(points, dim, generator=generator) / dim**0.5
    x = normalize(centres[torch.arange(points) % clusters] + 1.5 * noise)
    return x.to(device()), centres.to(device())


def _race(
    rivals: dict[str, Callable[[Tensor], Tensor]], x: Tensor, repeats: int
) -> tuple[dict[str, Times], dict[str, Tensor]]:
    """Times of the rivals' passes, taken in turn (A B A B ...), and their answers."""
    times = {name: Times([], []) for name in rivals}
    answers: dict[str, Tensor] = {}
    for rival in rivals.values():
        rival(x[:WARM_UP])
    for _ in range(repeats):
        for name, rival in rivals.items():
            wall, cpu = now(), time.process_time()
            answers[name] = rival(x)
            times[name].wall.append(now() - wall)
            times[name].cpu.append(time.process_time() - cpu)
            report(f"{name:<9} {times[name].wall[-1]:.3f} s")
    return times, answers

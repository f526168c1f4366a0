"""How much of the machine's own matrix-multiply rate a training step reaches, for each way of tuning.

    cost = measure(("dinov2-small", "dinov2-base"))
    cost["backbones"]["dinov2-small"]["lp-ln"]["share"]          # of the rate of one large product of matrices

A step's arithmetic is that of its matrix products alone, so the share also pays for norms, activations and the
optimiser. The product of two square matrices is timed before every step, in the same process and with the same threads.
Seconds are the processor's: what other programs take from a core is not counted.
"""

from __future__ import annotations

import statistics
from operator import truediv
from typing import Any

import torch

from benchmarks.common import Line, at_least_one, device, report, step_seconds, trained_step
from patchgen.diagnose.cost import count_flops, random_batch

METHODS = ("lp", "lp-ln", "full", "patchgen")
STEP_TARGET = 1.06  # the most that a step of `patchgen` may take of LP+LN's
SHARE_TARGET = 0.6  # the least share of LP+LN
SMALL = {"sources": ("tiny",), "image_size": 56, "batch": 2, "repeats": 1}
SIDE = 1536  # of the square matrices


def measure(
    sources: tuple[str, ...] = ("dinov2-small", "dinov2-base"),
    *,
    image_size: int = 224,
    batch: int = 4,
    repeats: int = 5,
) -> dict[str, Any]:
    """Time the steps of `METHODS` on each backbone.

    Args:
        sources: Backbones; a name gets random weights.
        image_size: Pixels of the square images.
        batch: Images per step.
        repeats: Timed steps of each method, after one that warms up.
    """
    at_least_one(batch=batch, repeats=repeats)
    return {
        "image_size": image_size, "batch": batch, "repeats": repeats, "threads": torch.get_num_threads(),
        "backbones": {source: _methods(source, image_size, batch, repeats) for source in sources},
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    for source, methods in found["backbones"].items():
        for name, each in methods.items():
            what = f"{source}, {found['image_size']} px: {name}"
            share, step = f"{each['share']:.2f}", f"{each['step']:.3f} (floor {each['floor']:.3f})"
            if name == "lp-ln":
                rows.append(
                    (f"{what}, share of the matmul rate", share, f">= {SHARE_TARGET}", each["share"] >= SHARE_TARGET)
                )
                continue  # its step is what the others are compared with
            rows.append((f"{what}, share of the matmul rate", share))
            what = f"{what}, step / LP+LN's"
            reached = each["step"] <= STEP_TARGET
            rows.append((what, step, f"<= {STEP_TARGET}", reached) if name == "patchgen" else (what, step))
    return rows


def _methods(source: str, image_size: int, batch: int, repeats: int) -> dict[str, dict[str, float]]:
    data = random_batch(batch, image_size, device())
    steps = {name: trained_step(name, source, image_size) for name in METHODS}
    flops = {name: count_flops(step, data) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    shares: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            rate = matmul_rate()
            taken = step_seconds(step, data)
            if turn:  # the first warms up
                seconds[name].append(taken)
                shares[name].append(flops[name] / taken / rate)
    found = {}
    for name in METHODS:
        found[name] = {
            "gflops_per_image": flops[name] / batch / 1e9,
            "share": statistics.median(shares[name]),
            "step": statistics.median(map(truediv, seconds[name], seconds["lp-ln"])),
            "floor": flops[name] / flops["lp-ln"],
        }
        report(f"{source} {name:<8} {found[name]['share']:.2f} of the matmul rate")
    return found


def matmul_rate(side: int = SIDE) -> float:
    """Floating-point operations a second of a product of two (side, side) matrices."""
    a = torch.ones(side, side, device=device())
    return 2 * side**3 / step_seconds(torch.matmul, a, a)

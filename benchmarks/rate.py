"""How much of the machine's own matrix-multiply rate a training step reaches, for each way of tuning.

    cost = measure(("dinov2-small", "dinov2-base"))
    cost["backbones"]["dinov2-small"]["lp-ln"]["share"]          # of the rate of one large product of matrices

A step's arithmetic is that of its matrix products alone, so the share also pays for norms, activations and the
optimiser. The product of two square matrices is timed before every step, in the same process and with the same threads.
Seconds are the processor's: what other programs take from a core is not counted.
"""

import statistics
from collections.abc import Callable
from functools import partial
from operator import truediv
from typing import Any

import torch

from benchmarks.common import Line, at_least_one, device, report, step_seconds, take_turns, trained_step
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


def lines(result: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    for source, methods in result["backbones"].items():
        for name, each in methods.items():
            what = f"{source}, {result['image_size']} px: {name}"
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
    matrix = torch.ones(SIDE, SIDE, device=device())
    works: dict[str, Callable[[], object]] = {}
    for name, step in steps.items():
        works |= {f"matmul before {name}": partial(torch.matmul, matrix, matrix), name: partial(step, data)}
    seconds = take_turns(works, repeats, step_seconds)
    result = {}
    for name in METHODS:
        products = map(truediv, seconds[f"matmul before {name}"], seconds[name])
        result[name] = {
            "gflops_per_image": flops[name] / batch / 1e9,
            "share": flops[name] / (2 * SIDE**3) * statistics.median(products),
            "step": statistics.median(map(truediv, seconds[name], seconds["lp-ln"])),
            "floor": flops[name] / flops["lp-ln"],
        }
        report(f"{source} {name:<8} {result[name]['share']:.2f} of the matmul rate")
    return result

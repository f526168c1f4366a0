"""How much of the machine's own matrix-multiply rate a training step reaches, for each way of tuning.

    cost = measure_rates(["dinov2-small", "dinov2-base"])
    cost["backbones"]["dinov2-small"]["lp-ln"]["share"]          # of the rate of one large product of matrices

A step's arithmetic is that of its matrix products alone (`cost` counts it), so the share also pays for norms,
activations and the optimiser. The product of two square matrices is timed before every step, in the same process and
with the same threads. Seconds are the processor's: what other programs take from a core is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from patchgen.diagnose.cost import TARGET as STEP_TARGET
from patchgen.diagnose.cost import Report, _count_flops, _device, _now, _random_batch, _rival
from patchgen.model.backbone import BACKBONES, load_backbone, set_tuning

METHODS = ("lp", "lp-ln", "full", "patchgen")
SHARE_TARGET = 0.6  # the least share of LP+LN
SIDE = 1536  # of the square matrices


def measure_rates(
    sources: Sequence[str] = ("dinov2-small", "dinov2-base"),
    *,
    image_size: int = 224,
    batch: int = 4,
    repeats: int = 5,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Time the steps of `METHODS` on each backbone; `report` gets one line per backbone and method."""
    for name, value in {"batch": batch, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    return {
        "image_size": image_size, "batch": batch, "repeats": repeats, "threads": torch.get_num_threads(),
        "share_target": SHARE_TARGET, "step_target": STEP_TARGET,
        "backbones": {source: _methods(source, image_size, batch, repeats, report) for source in sources},
    }  # fmt: skip


def pieces(sources: Sequence[str]) -> int:
    """Lines that `measure_rates` reports."""
    return len(sources) * len(METHODS)


def _methods(source: str, image_size: int, batch: int, repeats: int, report: Report) -> dict[str, dict[str, float]]:
    named = source == "auto" or source in BACKBONES
    backbone = load_backbone(source, pretrained=not named, image_size=image_size)
    data, one = _random_batch(batch, image_size), _random_batch(1, image_size)
    rivals = {name: _rival(name, backbone, image_size) for name in METHODS}
    flops: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    shares: dict[str, list[float]] = {name: [] for name in METHODS}
    for name, rival in rivals.items():
        set_tuning(backbone, rival.method.chosen_tune)  # the rivals share it, and leave it as they tune it
        flops[name] = batch * _count_flops(rival, one)
    for turn in range(repeats + 1):
        for name, rival in rivals.items():
            set_tuning(backbone, rival.method.chosen_tune)
            rate = matmul_rate()
            taken = _cpu_seconds(lambda rival=rival: rival.step(data))
            if turn:  # the first warms up
                seconds[name].append(taken)
                shares[name].append(flops[name] / taken / rate)
    found = {}
    for name in METHODS:
        found[name] = {
            "gflops_per_image": flops[name] / batch / 1e9,
            "share": statistics.median(shares[name]),
            "step": _of_pairs(seconds[name], seconds["lp-ln"]),
            "floor": flops[name] / flops["lp-ln"],
        }
        report(f"{source} {name:<8} {found[name]['share']:.2f} of the matmul rate")
    return found


def matmul_rate(side: int = SIDE) -> float:
    """Floating-point operations a second of a product of two (side, side) matrices."""
    a = torch.ones(side, side, device=_device())
    return 2 * side**3 / _cpu_seconds(lambda: a @ a)


def _of_pairs(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(own / other for own, other in zip(mine, theirs, strict=True))


def _cpu_seconds(work: Any) -> float:
    """Of all threads, divided by their number; on an accelerator the clock's."""
    device = _device()
    if device.type != "cpu":
        start = _now(device)
        work()
        return _now(device) - start
    start = time.process_time()
    work()
    return (time.process_time() - start) / torch.get_num_threads()

"""What number format and compiler make of a training step on this machine: LP+LN in four ways, against plain float32.

    cost = measure_modes("dinov2-small", image_size=224)
    cost["modes"]["compiled"]["faster"]          # times as fast as plain float32; below 1 it does not pay
    cost["modes"]["compiled"]["compile_seconds"] # on the clock, once a run and shape

Each way has its own backbone with the same weights, and steps as the trainer does (`--precision`, `--compile`). They
take turns in one process; a ratio is the median over turns. Seconds of a step are the processor's, as in `cost_rate`;
those of compiling are the clock's, because other processes do a part of it, and start on an empty cache.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from lightning_fabric import Fabric

from patchgen.data.loaders import Batch
from patchgen.diagnose.cost import BASELINE, Report, Rival, _device, _random_batch, _rival
from patchgen.diagnose.cost_rate import _cpu_seconds
from patchgen.model.backbone import BACKBONES, load_backbone
from patchgen.model.compiled import BACKEND, compile_blocks

Precision = Literal["32-true", "bf16-mixed"]


class Mode(NamedTuple):
    """Of a step: its number format, and whether the blocks are compiled."""

    precision: Precision
    compiled: bool


PLAIN = "float32"
MODES = {
    PLAIN: Mode("32-true", False),
    "float32 again": Mode("32-true", False),  # how far from 1 nothing but noise leads
    "bf16-mixed": Mode("bf16-mixed", False),
    "compiled": Mode("32-true", True),
    "compiled, bf16-mixed": Mode("bf16-mixed", True),
}


def measure_modes(
    source: str = "dinov2-small",
    *,
    image_size: int = 224,
    batch: int = 8,
    repeats: int = 5,
    backend: str = BACKEND,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Time the steps of `MODES` in turn.

    Args:
        source: What `load_backbone` takes; a named architecture gets random weights, which cost the same.
        batch: Images in a step.
        repeats: Timed steps of each mode, after one that warms up.
        backend: Of `torch.compile`.
        report: Called with one line a mode.
    """
    for name, value in {"batch": batch, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    data = _random_batch(batch, image_size)
    runners = _runners(source, data, backend)
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    for turn in range(repeats + 1):
        for name, runner in runners.items():
            taken = _cpu_seconds(lambda runner=runner: runner.step(data))
            if turn:  # the first warms up
                seconds[name].append(taken)
    modes = {name: _found(runner, seconds[name], seconds[PLAIN]) for name, runner in runners.items()}
    for name, each in modes.items():
        report(f"{name:<20} {each['faster']:.2f} times as fast")
    return {
        "backbone": source, "image_size": image_size, "batch": batch, "repeats": repeats, "device": str(_device()),
        "threads": torch.get_num_threads(), "modes": modes,
    }  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """A mode at work."""

    rival: Rival
    fabric: Fabric
    compile_seconds: float | None  # None: not asked for
    fell_back: str | None  # what was said, where compiling failed

    def step(self, batch: Batch) -> None:
        """As the trainer's: the number format is the model's alone, losses are float32."""
        with self.fabric.autocast():
            out = self.rival.model(batch.image)
        out = out._replace(**{k: v.float() for k, v in out._asdict().items() if isinstance(v, torch.Tensor)})
        losses = self.rival.method.losses(out, batch)
        torch.autograd.backward(sum(losses.values(), batch.image.new_zeros(())))
        self.rival.optimizer.step()
        self.rival.optimizer.zero_grad()


def _runners(source: str, data: Batch, backend: str) -> dict[str, Runner]:
    from torch._inductor.utils import fresh_inductor_cache

    torch.compiler.reset()
    with fresh_inductor_cache():
        return {name: _runner(source, data, mode, backend) for name, mode in MODES.items()}


def _runner(source: str, data: Batch, mode: Mode, backend: str) -> Runner:
    size = data.image.shape[-1]
    named = source == "auto" or source in BACKBONES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the head
        rival = _rival(BASELINE, load_backbone(source, pretrained=not named, image_size=size), size)
    fabric = Fabric(accelerator=_device().type, devices=1, precision=mode.precision)
    if not mode.compiled:
        return Runner(rival, fabric, None, None)
    said: list[str] = []
    start = time.perf_counter()
    with fabric.autocast():
        done = compile_blocks(rival.model.backbone, data.image, said.append, backend=backend)
    return Runner(rival, fabric, time.perf_counter() - start, None if done else said[0])


def _found(runner: Runner, own: list[float], plain: list[float]) -> dict[str, Any]:
    ratios = [theirs / mine for mine, theirs in zip(own, plain, strict=True)]
    return {
        "faster": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
        "median_seconds": statistics.median(own), "compile_seconds": runner.compile_seconds,
        "fell_back": runner.fell_back,
    }  # fmt: skip

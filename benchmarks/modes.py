"""What number format and compiler make of a training step on this machine: LP+LN in four ways, against plain float32.

    cost = measure("dinov2-small", image_size=224)
    cost["modes"]["compiled"]["faster"]          # times as fast as plain float32; below 1 it does not pay
    cost["modes"]["compiled"]["compile_seconds"] # on the clock, once a run and shape

Each way has its own backbone with the same weights, and steps as the trainer does (`--precision`, `--compile`). They
take turns in one process; a ratio is the median over turns. Seconds of a step are the processor's; those
of compiling are the clock's, because other processes do a part of it, and start on an empty cache.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from benchmarks.common import Line, at_least_one, device, report, step_seconds, take_turns, trained_step
from patchgen.data.loaders import Batch
from patchgen.diagnose.cost import BASELINE, Step, random_batch
from patchgen.model.device import BACKEND, SingleDevice, compile_blocks

Precision = Literal["32-true", "bf16-mixed"]


SMALL = {"source": "tiny", "image_size": 28, "batch": 2, "repeats": 1, "backend": "aot_eager"}
PLAIN = "float32"
MODES: dict[str, tuple[Precision, bool]] = {  # number format, and whether the blocks are compiled
    PLAIN: ("32-true", False),
    "float32 again": ("32-true", False),  # how far from 1 nothing but noise leads
    "bf16-mixed": ("bf16-mixed", False),
    "compiled": ("32-true", True),
    "compiled, bf16-mixed": ("bf16-mixed", True),
}


def measure(
    source: str = "dinov2-small", *, image_size: int = 224, batch: int = 8, repeats: int = 5, backend: str = BACKEND
) -> dict[str, Any]:
    """Time the steps of `MODES` in turn.

    Args:
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images.
        batch: Images per step.
        repeats: Timed steps of each mode, after one that warms up.
        backend: Of `torch.compile`.
    """
    at_least_one(batch=batch, repeats=repeats)
    data = random_batch(batch, image_size, device())
    runners = _runners(source, data, backend)
    works = {name: partial(runner.step, data) for name, runner in runners.items()}
    seconds = take_turns(works, repeats, step_seconds)
    modes = {name: _found(runner, seconds[name], seconds[PLAIN]) for name, runner in runners.items()}
    for name, each in modes.items():
        report(f"{name:<20} {each['faster']:.2f} times as fast")
    return {
        "backbone": source, "image_size": image_size, "batch": batch, "repeats": repeats, "device": str(device()),
        "threads": torch.get_num_threads(), "modes": modes,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    for name, each in result["modes"].items():
        if name == PLAIN:
            continue
        value = f"{each['faster']:.2f} ({each['lowest']:.2f}-{each['highest']:.2f})"
        if each["fell_back"]:
            value += ", not compiled"
        elif each["compile_seconds"] is not None:
            value += f", after {each['compile_seconds']:.0f} s of compiling"
        what = f"{result['backbone']}, {result['image_size']} px, {result['device']}: LP+LN step, {name}"
        rows.append((f"{what}: times as fast as {PLAIN}", value))
    return rows


@dataclass(frozen=True)
class Runner:
    """A mode at work."""

    own: Step
    fabric: SingleDevice
    compile_seconds: float | None  # None: not asked for
    fell_back: str | None  # what was said, where compiling failed

    def step(self, batch: Batch) -> None:
        """As the trainer's: the number format is the model's alone, losses are float32."""
        with self.fabric.autocast():
            out = self.own.model(batch.image)
        out = out._replace(**{k: v.float() for k, v in out._asdict().items() if isinstance(v, torch.Tensor)})
        losses = self.own.method.losses(out, batch)
        torch.autograd.backward(sum(losses.values(), batch.image.new_zeros(())))
        self.own.optimizer.step()
        self.own.optimizer.zero_grad()


def _runners(source: str, data: Batch, backend: str) -> dict[str, Runner]:
    from torch._inductor.utils import fresh_inductor_cache

    torch.compiler.reset()
    with fresh_inductor_cache():
        return {name: _runner(source, data, *mode, backend) for name, mode in MODES.items()}


def _runner(source: str, data: Batch, precision: Precision, compiled: bool, backend: str) -> Runner:
    size = data.image.shape[-1]
    step = trained_step(BASELINE, source, size)
    fabric = SingleDevice(device().type, precision)
    if not compiled:
        return Runner(step, fabric, None, None)
    said: list[str] = []
    start = time.perf_counter()
    with fabric.autocast():
        done = compile_blocks(step.model.backbone, data.image, said.append, backend=backend)
    return Runner(step, fabric, time.perf_counter() - start, None if done else said[0])


def _found(runner: Runner, own: list[float], plain: list[float]) -> dict[str, Any]:
    ratios = [theirs / mine for mine, theirs in zip(own, plain, strict=True)]
    return {
        "faster": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
        "median_seconds": statistics.median(own), "compile_seconds": runner.compile_seconds,
        "fell_back": runner.fell_back,
    }  # fmt: skip

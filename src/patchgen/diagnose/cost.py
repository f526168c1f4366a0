"""What PatchGen adds to LP+LN: seconds of a training step, arithmetic, parameters, and memory over the patches.

    cost = measure_step("dinov2-small", image_size=224)
    cost["ratio"]["of_medians"], cost["ratio"]["floor"]      # measured, and what the matrix products alone demand
    cost["memory"]["exponent"]                               # of the peak bytes: about 1 for PatchGen, 2 for P x P

Times are taken in one process, one step of each method in turn, so that a machine busy with other work disturbs both
alike. Bytes and floating-point operations are counted, not timed: they are the same on every run. The floor is a
ratio of matrix products: the backbone's other work (norms, activations) can bring the measured one slightly below it.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import Method, make_method
from patchgen.model.backbone import BACKBONES, Backbone, load_backbone, set_tuning
from patchgen.model.classifier import Classifier
from patchgen.model.patchgen import PatchGen, PatchGenOutput, default_heads
from patchgen.train.optim import make_optimizer

BASELINE, MEASURED = "lp-ln", "patchgen"
TARGET = 1.06  # the largest time ratio wanted at 224 px
MEMORY_TARGET = 0.1  # the largest share of the explicit version's bytes wanted at the largest P
NUM_CLASSES = 7
MODULE_DIM = 384  # of the memory comparison: ViT-S, 6 heads
PATCHES = (256, 1024, 4096)
Forward = Callable[[PatchGen, Tensor], PatchGenOutput]
Report = Callable[[str], None]


def measure_step(
    source: str = "dinov2-small",
    *,
    image_size: int = 224,
    batch: int = 8,
    repeats: int = 5,
    patches: Sequence[int] = PATCHES,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Compare a training step of PatchGen with one of LP+LN, and the module's memory with an explicit P x P version.

    Args:
        source: what `load_backbone` takes; a named architecture gets random weights, which cost the same.
        batch: images in a step.
        repeats: timed steps of each method, after one that warms up.
        patches: P of the memory comparison.
        report: called with one line per finished piece of work, `pieces(repeats, patches)` times.
    """
    for name, value in {"batch": batch, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    named = source == "auto" or source in BACKBONES
    backbone = load_backbone(source, pretrained=not named, image_size=image_size)
    data = _random_batch(batch, image_size)
    rivals = {name: _rival(name, backbone, image_size) for name in (BASELINE, MEASURED)}
    flops = {name: _count_flops(rival, _random_batch(1, image_size)) for name, rival in rivals.items()}
    times = _race(rivals, data, repeats, report)
    select = rivals[MEASURED].model.select
    parameters = {"backbone": _count(backbone), "module": _count(select) if select else 0}
    return {
        "backbone": {"source": source, "resolved": backbone.resolved, "parameters": parameters["backbone"]},
        "image_size": image_size,
        "patches": math.prod(backbone.grid(image_size)),
        "batch": batch,
        "repeats": repeats,
        "machine": {"device": str(data.image.device), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "methods": {
            name: {
                "trainable_parameters": _count(rival.model, trainable=True),
                "gflops_per_image": flops[name] / 1e9,
                "median_seconds": statistics.median(times[name].wall),
                "fastest_seconds": min(times[name].wall),
                "median_cpu_seconds": statistics.median(times[name].cpu),
                "seconds": times[name].wall,
                "cpu_seconds": times[name].cpu,
            }
            for name, rival in rivals.items()
        },
        "module": {"parameters": parameters["module"], "of_backbone": parameters["module"] / parameters["backbone"]},
        "ratio": compare(times[MEASURED], times[BASELINE]) | {"floor": flops[MEASURED] / flops[BASELINE]},
        "memory": measure_memory(patches=patches, report=report),
    }


def pieces(repeats: int, patches: Sequence[int] = PATCHES) -> int:
    """How many lines `measure_step` reports."""
    return 2 * (repeats + 1) + 2 * len(patches)


@dataclass(frozen=True)
class Times:
    """Seconds of each step, on the clock and of this process's threads; the latter leave out waiting for a core."""

    wall: list[float]
    cpu: list[float]


def compare(measured: Times, baseline: Times) -> dict[str, Any]:
    """Ratios of two series timed in turn; the quartiles are those of the ratios of neighbouring steps.

    `conclusive` is False where the quartiles lie further apart than the share that is asked about (`TARGET` - 1).
    """
    low, high = np.percentile(np.divide(measured.wall, baseline.wall), (25, 75))
    return {
        "of_medians": statistics.median(measured.wall) / statistics.median(baseline.wall),
        "lower_quartile": float(low),
        "upper_quartile": float(high),
        "of_fastest": min(measured.wall) / min(baseline.wall),
        "of_cpu_medians": statistics.median(measured.cpu) / statistics.median(baseline.cpu),
        "conclusive": bool(high - low <= TARGET - 1),
        "target": TARGET,
    }


# The step


@dataclass(frozen=True)
class Rival:
    """A method as the trainer runs it."""

    method: Method
    model: Classifier
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch) -> None:
        """Forward, named losses, backward, update: what the trainer does with a batch that is already there."""
        out = self.model(batch.image)
        losses = self.method.losses(out, batch)
        torch.autograd.backward(sum(losses.values(), batch.image.new_zeros(())))
        self.method.watch(out, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _rival(name: str, backbone: Backbone, image_size: int) -> Rival:
    """The rivals share one backbone, so that neither finds its weights in a better place of the memory."""
    config = Config(data="random", unseen="none", method=name, image_size=image_size)
    method = make_method(config)
    set_tuning(backbone, method.chosen_tune)
    model = Classifier(backbone, NUM_CLASSES, image_size=image_size, pool=method.chosen_pool).to(_device())
    return Rival(method, model, make_optimizer(model, config))


def _race(rivals: dict[str, Rival], data: Batch, repeats: int, report: Report) -> dict[str, Times]:
    """Times of each rival's steps, taken in turn (A B A B ...); the first round warms up and is dropped."""
    times = {name: Times([], []) for name in rivals}
    for turn in range(repeats + 1):
        for name, rival in rivals.items():
            wall, cpu = _now(data.image.device), time.process_time()
            rival.step(data)
            times[name].wall.append(_now(data.image.device) - wall)
            times[name].cpu.append(time.process_time() - cpu)
            report(f"{name:<8} {times[name].wall[-1]:.3f} s{'' if turn else ' (warm-up)'}")
    return {name: Times(taken.wall[1:], taken.cpu[1:]) for name, taken in times.items()}


def _count_flops(rival: Rival, batch: Batch) -> int:
    """Matrix-product FLOPs of forward and backward: weight gradients only where weights learn.

    Attention runs unfused here, because the counter knows its products only then (six a layer, two of them forward).
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        losses = rival.method.losses(rival.model(batch.image), batch)
        torch.autograd.backward(sum(losses.values(), batch.image.new_zeros(())))
    rival.optimizer.zero_grad()
    return counter.get_total_flops()


def _random_batch(size: int, image_size: int) -> Batch:
    device, generator = _device(), torch.Generator().manual_seed(0)
    image = torch.randn(size, 3, image_size, image_size, generator=generator).to(device)
    index = torch.arange(size, device=device)
    return Batch(image, index % NUM_CLASSES, torch.zeros_like(index), index)


def _device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _now(device: torch.device) -> float:
    if device.type != "cpu":  # an accelerator returns before its work is done
        torch.accelerator.synchronize()
    return time.perf_counter()


def _count(module: nn.Module, trainable: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


# Memory over the patches


def explicit_forward(module: PatchGen, tokens: Tensor) -> PatchGenOutput:
    """The naive reference: PatchGen's equations as they are written, with the (B, H, P, P) scores formed."""
    q, k, v = module.qkv(tokens).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, P, d_k)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, P, P)
    mask = scores.mean((1, 3)).sigmoid()  # Eq. 3: mean over heads and targets, (B, P)
    u = (scores / module.log_temperature.exp()).softmax(-1) @ v  # (B, H, P, d_k)
    weighted = module.out(u.transpose(1, 2).flatten(2)) * module.rho.T  # (B, P, D)
    selected, rest = (weighted * mask.unsqueeze(2)).sum(1), (weighted * (1 - mask).unsqueeze(2)).sum(1)
    gate = module.gate(selected)
    return PatchGenOutput(mask, module.refine(gate * selected), module.refine(gate * rest))


FORWARDS: dict[str, Forward] = {"patchgen": lambda module, tokens: module(tokens), "explicit": explicit_forward}


def measure_memory(
    *, dim: int = MODULE_DIM, patches: Sequence[int] = PATCHES, report: Report = lambda _: None
) -> dict[str, Any]:
    """Peak bytes of forward and backward on one image over P, and the power of P with which they grow.

    The exponent is the slope of a log-log line through all P; gradients of the weights, which do not depend on P,
    are part of the bytes and pull it down where P is small.
    """
    rows = []
    for count in patches:
        row = {"patches": count}
        for name, forward in FORWARDS.items():
            row[name] = peak_bytes(forward, dim, count)
            report(f"{name:<8} {row[name] / 1e6:.1f} MB at {count} patches")
        rows.append(row)
    exponent = {name: _slope(patches, [row[name] for row in rows]) for name in FORWARDS}
    largest = rows[-1]["patchgen"] / rows[-1]["explicit"]
    return {
        "dim": dim, "heads": default_heads(dim), "batch": 1, "bytes": rows, "exponent": exponent,
        "of_explicit_at_largest": largest, "target": MEMORY_TARGET,
    }  # fmt: skip


def peak_bytes(forward: Forward, dim: int, num_patches: int) -> int:
    """Most bytes alive at once while the module learns from one image, beyond its weights and the tokens."""
    generator = torch.Generator().manual_seed(0)
    module = PatchGen(dim, num_patches, grid=(1, num_patches))
    tokens = torch.randn(1, num_patches, dim, generator=generator).requires_grad_()
    with PeakMemory([tokens, *module.parameters()]) as memory:
        out = forward(module, tokens)
        (out.selected.square().mean() + out.mask.mean()).backward()
    return memory.peak


class PeakMemory(TorchDispatchMode):
    """Follows the storages that operations allocate: `alive` and `peak` in bytes, on any device.

    Scratch space inside a single kernel is not seen; fused attention needs a block of rows there, never P x P.

    Args:
        given: tensors that exist already and are not counted, nor are views of them.
    """

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): None for tensor in given})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = None
        size = storage.nbytes()
        weakref.finalize(storage, self._release, size)
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _release(self, size: int) -> None:
        self.alive -= size


def _slope(x: Sequence[int], y: Sequence[int]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])

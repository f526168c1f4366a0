"""Cost of a training step of PatchGen relative to LP+LN on this machine.

    cost = measure_step("dinov2-small", image_size=224)
    cost["methods"]["patchgen"]["ratio"]["of_medians"]       # step time / LP+LN's
    cost["methods"]["patchgen"]["ratio"]["floor"]            # ratio of the matrix products alone
    cost["methods"]["lp-ln"]["ratio"]["of_medians"]          # LP+LN against itself: the effect of noise

Steps of the methods alternate in one process, so that other load on the machine affects all equally. Bytes and
floating-point operations are counted, not timed: they are the same in every run. The floor is a ratio of matrix
products: the backbone's other work (norms, activations) can bring the measured ratio slightly below it.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from patchgen.methods.build import build_on
from patchgen.model.backbone import Backbone, load_architecture
from patchgen.model.classifier import Classifier
from patchgen.train.optim import make_optimizer
from patchgen.train.step import PlainStep

BASELINE, MEASURED = "lp-ln", ("patchgen", "patchgen-select")
AGAIN = "lp-ln again"
TARGET = 1.06  # target: maximum time ratio of `patchgen` at 224 px
DOMAINS, NUM_CLASSES = 3, 7  # of a random batch


def of_module(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The results of `measure_step` for the single method measured next to LP+LN."""
    found: dict[str, Any] = next(method for name, method in cost["methods"].items() if name != BASELINE)
    return found


def measure_step(
    source: str = "dinov2-small",
    *,
    image_size: int = 224,
    batch: int = 8,
    repeats: int = 5,
    measured: Sequence[str] = MEASURED,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare training steps of the measured methods, which tune what LP+LN tunes, with one of LP+LN.

    Args:
        source: As for `load_architecture`; random weights cost the same as trained ones.
        batch: Images per step.
        repeats: Timed steps of each method, after a warm-up.
        report: Called with one line per step, `pieces(repeats, measured)` times.
    """
    for name, value in {"batch": batch, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    backbone = load_architecture(source, image_size)
    rivals = {name: make_rival(name, backbone, image_size) for name in (BASELINE, *measured)}
    one, data = random_batch(1, image_size), random_batch(batch, image_size)
    flops = {name: count_flops(rival, one) for name, rival in rivals.items()}
    peaks = {name: step_peak(rival, data) for name, rival in rivals.items()}
    times = _race(rivals | {AGAIN: rivals[BASELINE]}, data, repeats, report)
    size = sum(p.numel() for p in backbone.parameters())
    methods: dict[str, Any] = {}
    for name, rival in rivals.items():
        taken, module = times[name], rival.model.select
        own = sum(p.numel() for p in module.parameters()) if module else 0
        methods[name] = {
            "trainable_parameters": sum(p.numel() for group in rival.optimizer.param_groups for p in group["params"]),
            "module_parameters": own,
            "module_of_backbone": own / size,
            "gflops_per_image": flops[name] / 1e9,
            "peak_bytes": peaks[name],
            "median_seconds": statistics.median(taken.wall),
            "fastest_seconds": min(taken.wall),
            "median_cpu_seconds": statistics.median(taken.cpu),
            "seconds": taken.wall,
            "cpu_seconds": taken.cpu,
            "ratio": compare(times[AGAIN] if name == BASELINE else taken, times[BASELINE])
            | {"floor": flops[name] / flops[BASELINE], "peak_bytes": peaks[name] / peaks[BASELINE]},
        }
    return {
        "backbone": {"source": source, "resolved": backbone.resolved, "parameters": size},
        "image_size": image_size,
        "patches": math.prod(backbone.grid(image_size)),
        "batch": batch,
        "repeats": repeats,
        "machine": {"device": str(device()), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "methods": methods,
    }


def pieces(repeats: int, measured: Sequence[str] = MEASURED) -> int:
    """The number of lines that `measure_step` reports."""
    return (repeats + 1) * (len(measured) + 2)


@dataclass(frozen=True)
class Times:
    """Seconds of each step, as wall-clock time and as CPU time, which excludes waiting for a core."""

    wall: list[float]
    cpu: list[float]


def compare(measured: Times, baseline: Times) -> dict[str, Any]:
    """Ratios of two alternating series; the quartiles are those of the ratios of neighbouring steps.

    `conclusive` is False if the quartiles are further apart than the share in question (`TARGET` - 1).
    """
    low, high = np.percentile(np.divide(measured.wall, baseline.wall), (25, 75))
    return {
        "of_medians": statistics.median(measured.wall) / statistics.median(baseline.wall),
        "lower_quartile": float(low),
        "upper_quartile": float(high),
        "of_fastest": min(measured.wall) / min(baseline.wall),
        "of_cpu_medians": statistics.median(measured.cpu) / statistics.median(baseline.cpu),
        "conclusive": bool(high - low <= TARGET - 1),
    }


# The step


@dataclass
class Rival:
    """A method with its model and optimiser, ready for steps."""

    method: Method
    model: Classifier
    optimizer: torch.optim.Optimizer
    number: int = 0

    def step(self, batch: Batch) -> None:
        """The whole step as in the trainer, with a given batch."""
        PlainStep(self.method, self.model, self.optimizer, batch, self.number).take()
        self.number += 1


def make_rival(name: str, backbone: Backbone, image_size: int, **settings: Any) -> Rival:
    """A method set up as in the trainer; rivals may share a backbone if they tune the same part of it."""
    config = Config("random", "none", method=name, backbone=backbone.source, image_size=image_size, **settings)
    method = make_method(config)
    method.class_names = tuple(f"thing {number}" for number in range(NUM_CLASSES))
    model = build_on(backbone, config, method, NUM_CLASSES).to(device())
    method.sources = tuple(range(DOMAINS))
    method.setup(model)
    method.to(device())
    return Rival(method, model, make_optimizer(model, config, method))


def random_batch(size: int, image_size: int) -> Batch:
    """`size` images, sorted by domain."""
    image = torch.randn(size, 3, image_size, image_size, generator=torch.Generator().manual_seed(0)).to(device())
    index = torch.arange(size, device=image.device)
    return Batch(image, index % NUM_CLASSES, index * DOMAINS // size, index)


def _race(rivals: Mapping[str, Rival], data: Batch, repeats: int, report: Callable[[str], None]) -> dict[str, Times]:
    """Times of each rival's steps, taken in turn (A B A B ...); the first round warms up and is dropped."""
    times = {name: Times([], []) for name in rivals}
    for turn in range(repeats + 1):
        for name, rival in rivals.items():
            wall, cpu = now(), time.process_time()
            rival.step(data)
            times[name].wall.append(now() - wall)
            times[name].cpu.append(time.process_time() - cpu)
            report(f"{name:<15} {times[name].wall[-1]:.3f} s{'' if turn else ' (warm-up)'}")
    return {name: Times(taken.wall[1:], taken.cpu[1:]) for name, taken in times.items()}


def device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def now() -> float:
    if device().type != "cpu":  # accelerators work asynchronously
        torch.accelerator.synchronize()
    return time.perf_counter()


# What is counted


def count_flops(rival: Rival, batch: Batch) -> int:
    """Matrix-product FLOPs of forward and backward: weight gradients only for trained weights.

    Attention runs unfused here, because the counter does not see fused products (six per layer, two of them forward).
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        losses = rival.method.losses(rival.model(batch.image), batch)
        torch.autograd.backward(torch.stack(list(losses.values())).sum())
    rival.optimizer.zero_grad()
    return counter.get_total_flops()


def step_peak(rival: Rival, batch: Batch) -> int:
    """Peak bytes of a step, beyond weights and images; the first step also allocates the optimiser state."""
    parts: tuple[nn.Module, ...] = (rival.model, rival.method)
    weights = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    with PeakMemory([batch.image, *weights]) as memory:
        rival.step(batch)
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

"""Cost of a training step of PatchGen relative to LP+LN, counted: parameters, arithmetic and memory.

    cost = count_step("dinov2-small", image_size=224)
    cost["methods"]["patchgen"]["ratio"]["flops"]            # of matrix products / LP+LN's
    cost["methods"]["patchgen"]["ratio"]["peak_bytes"]       # of a step's memory

Bytes and floating-point operations are the same in every run and on every machine; `python -m benchmarks rate` times
the steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from patchgen.train.loop import plain_step
from patchgen.train.optim import make_optimizer

BASELINE, MEASURED = "lp-ln", ("patchgen", "patchgen-select")
DOMAINS, NUM_CLASSES = 3, 7  # of a random batch


def of_module(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of `count_step` for the single method measured next to LP+LN."""
    return next(dict(counts) for name, counts in cost["methods"].items() if name != BASELINE)


def count_step(
    source: str = "dinov2-small", *, image_size: int = 224, batch: int = 8, measured: Sequence[str] = MEASURED
) -> dict[str, Any]:
    """Compare training steps of the measured methods, which tune what LP+LN tunes, with one of LP+LN.

    Args:
        source: As for `load_architecture`; random weights cost the same as trained ones.
        batch: Images per step.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    backbone = load_architecture(source, image_size)
    rivals = {name: make_rival(name, backbone, image_size) for name in (BASELINE, *measured)}
    flops = {name: count_flops(rival, random_batch(1, image_size)) for name, rival in rivals.items()}
    peaks = {name: step_peak(rival, random_batch(batch, image_size)) for name, rival in rivals.items()}
    size = sum(p.numel() for p in backbone.parameters())
    methods: dict[str, Any] = {}
    for name, rival in rivals.items():
        module = sum(p.numel() for p in rival.model.select.parameters()) if rival.model.select else 0
        methods[name] = {
            "trainable_parameters": sum(p.numel() for group in rival.optimizer.param_groups for p in group["params"]),
            "module_parameters": module,
            "module_of_backbone": module / size,
            "gflops_per_image": flops[name] / 1e9,
            "peak_bytes": peaks[name],
            "ratio": {"flops": flops[name] / flops[BASELINE], "peak_bytes": peaks[name] / peaks[BASELINE]},
        }
    return {
        "backbone": {"source": source, "resolved": backbone.resolved, "parameters": size},
        "image_size": image_size,
        "patches": math.prod(backbone.grid(image_size)),
        "batch": batch,
        "methods": methods,
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
        plain_step(self.method, self.model, self.optimizer, batch, self.number)
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


def random_batch(size: int, image_size: int, place: torch.device | str | None = None) -> Batch:
    """`size` images, a multiple of `DOMAINS` for whole steps, sorted by domain."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(size, 3, image_size, image_size, generator=generator).to(place or device())
    index = torch.arange(size, device=image.device)
    domains = None if size % DOMAINS else DOMAINS
    return Batch(image, index % NUM_CLASSES, index * DOMAINS // size, index, num_domains=domains)


def device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


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
        existing: tensors that are not counted, nor are views of them.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): None for tensor in existing})

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


# What `patchgen train --dry-run` says

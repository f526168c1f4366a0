"""What training steps cost, counted: parameters, arithmetic and memory, the same in every run and on every machine.

    cost = count_step("dinov2-small", image_size=224)
    cost["methods"]["patchgen"]["ratio"]["flops"]            # of matrix products / LP+LN's
    step_cost(config).bytes(96)                              # of a step in which 96 images are processed at once

`step_cost` follows shapes alone (PyTorch's fake tensors, on the meta device): a second for any backbone. Kernels that
need other scratch space than a CPU's are not seen. `python -m benchmarks rate` times the steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.fit.plan import measure, training_seconds
from patchgen.methods import Method, make_method
from patchgen.methods.build import build_on, recompute_activations
from patchgen.model.backbone import BACKBONES, Backbone, load_architecture
from patchgen.model.classifier import Classifier
from patchgen.runs.precision import computes_bf16
from patchgen.tasks import make_fold
from patchgen.train.loop import plain_step
from patchgen.train.optim import make_optimizer
from patchgen.train.parts import indivisible

BASELINE, MEASURED = "lp-ln", ("patchgen", "patchgen-select")
DOMAINS, NUM_CLASSES = 3, 7  # of a random batch
SIZES = 3, 6  # images of the steps whose memory is counted: it grows by the same number of bytes with each image
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # tensors that an optimiser keeps for each trained one
# settings that memory and arithmetic of a step depend on
DECIDING = ("backbone", "image_size", "precision", "checkpoint_activations", "tune", "lora_rank", "optimizer", "pool",
            "method", "hparams")  # fmt: skip


# Steps


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
    method = _method_of(config)
    model = build_on(backbone, config, method, NUM_CLASSES).to(device())
    method.setup(model)
    method.to(device())
    return Rival(method, model, make_optimizer(model, config, method))


def make_step(config: Config, compute: bool = True) -> Rival:
    """The method with its model, on the CPU; its optimiser is the simplest, whose state `step_cost` adds."""
    method = _method_of(config)
    named = config.backbone in BACKBONES  # others are read
    # not as fakes: initialisations ask for values
    with torch.device("meta") if named and not compute else nullcontext(), unset_fake_temporarily():
        backbone = load_architecture(config.backbone, config.image_size)
        model = build_on(backbone, config, method, NUM_CLASSES)
    if not compute:
        _without_values(model)
    method.setup(model)
    if config.checkpoint_activations:
        recompute_activations(backbone, config.method, model.pool == "select")
    return Rival(method, model, torch.optim.SGD([{"params": _trained(model, method)}], lr=1.0))


def _method_of(config: Config) -> Method:
    method = make_method(config)
    method.class_names = tuple(f"thing {number}" for number in range(NUM_CLASSES))
    method.sources = tuple(range(DOMAINS))
    return method


def _trained(*parts: nn.Module) -> list[nn.Parameter]:
    return [p for part in parts for p in part.parameters() if p.requires_grad]


def _without_values(model: nn.Module) -> None:
    """Replace parameters and buffers by those of the active fake mode."""
    fakes: dict[int, Tensor] = {}  # some modules share a parameter
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in fakes:
                        fake = torch.empty_like(tensor, device="cpu")
                        learns = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if learns else fake
                    tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]


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


def count_step(
    source: str = "dinov2-small", *, image_size: int = 224, batch: int = 8, measured: Sequence[str] = MEASURED
) -> dict[str, Any]:
    """Compare training steps of the measured methods, which tune what LP+LN tunes, with one of LP+LN."""
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


def of_module(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of `count_step` for the single method measured next to LP+LN."""
    return next(dict(counts) for name, counts in cost["methods"].items() if name != BASELINE)


@dataclass(frozen=True)
class StepCost:
    """Of one training step."""

    fixed: float  # bytes: weights, gradients, and the optimiser's state
    per_image: float  # bytes
    flops: float  # per image
    divisible: bool  # whether `--micro-batch` may divide it

    def bytes(self, images: int) -> float:
        return self.fixed + self.per_image * images


def step_cost(config: Config, compute: bool = False) -> StepCost:
    """Memory and arithmetic of a step; ValueError if it depends on values, so that it must be computed.

    Args:
        compute: Make the steps on the CPU, with random images, instead of only following their shapes.
    """
    half = config.precision == "bf16-mixed" or (config.precision == "auto" and computes_bf16(config.accelerator))
    with nullcontext() if compute else FakeTensorMode(allow_non_fake_inputs=True):
        rival = make_step(config, compute)
        small, large = (random_batch(size, config.image_size, "cpu") for size in SIZES)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                flops = count_flops(rival, large) / SIZES[1]
                peak, larger_peak = step_peak(rival, small), step_peak(rival, large)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(f"method {config.method!r}: its steps depend on the values of a batch") from error
    per_image = (larger_peak - peak) / (SIZES[1] - SIZES[0])
    state = STATES[config.optimizer or rival.method.optimizer] * _bytes(_trained(rival.model, rival.method))
    fixed = _bytes(rival.model.parameters()) + state + larger_peak - SIZES[1] * per_image
    return StepCost(fixed, per_image, flops, not indivisible(rival.method, rival.model))


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


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
    weights = [tensor for part in (rival.model, rival.method) for tensor in (*part.parameters(), *part.buffers())]
    with PeakMemory([batch.image, *weights]) as memory:
        rival.step(batch)
    return memory.peak


class PeakMemory(TorchDispatchMode):
    """Follows the storages that operations allocate, but for those of `existing` tensors: `alive` and `peak` in bytes.

    Scratch space inside a single kernel is not seen; fused attention needs a block of rows there, never P x P.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): None for tensor in existing})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = None
                weakref.finalize(storage, self._release, storage.nbytes())
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
        return result

    def _release(self, size: int) -> None:
        self.alive -= size


# What `--dry-run` says


def measured_costs(config: Config) -> dict[str, Any]:
    """Cost of a run: a few timed steps and forward passes, and counted bytes and operations of a step."""
    fold = make_fold(config)
    rate = measure(config, fold.classes)
    try:
        cost = step_cost(config)
    except ValueError:
        cost = step_cost(config, compute=True)
    images = config.batch_per_domain * len(fold.train)
    return {
        "images_per_step": images,
        "steps": config.steps,
        "seconds": training_seconds(config, fold, rate),
        "seconds_per_image": rate.step,
        "gflops_per_image": cost.flops / 1e9,
        "precision": config.precision,
        "bytes_per_image": cost.per_image,
        "bytes": cost.bytes(at_once(config, images)),
        "card_bytes": card_bytes(),
    }


def at_once(config: Config, images: int) -> int:
    """How many of the images of a step a device processes at once; all, where that is found by trying."""
    images = images // config.devices
    return min(images, config.images_at_once(images) or images)


def cost_lines(cost: dict[str, Any]) -> list[str]:
    """The costs in words, with a warning if the card is smaller than a step."""
    images, steps = cost["images_per_step"], cost["steps"]
    return [
        f"{steps} steps of {images} images",
        f"time: about {duration(cost['seconds'])} on this machine, {cost['seconds_per_image']:.3f} s per image "
        "(measured on a few steps, with evaluations)",
        f"arithmetic: {cost['gflops_per_image']:.1f} GFLOPs per training image, "
        f"{cost['gflops_per_image'] * images * steps / 1e6:.3g} PFLOPs in all steps",
        f"memory: {cost['bytes'] / 1e9:.2f} GB for a step with precision {cost['precision']}, "
        f"{cost['bytes_per_image'] / 1e6:.1f} MB per image",
        *_card_warning(cost["bytes"], cost["card_bytes"]),
    ]


def card_bytes() -> int | None:
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def _card_warning(needed: float, card: int | None) -> list[str]:
    if card is None or card >= needed:
        return []
    return [
        f"WARNING: this card has {card / 1e9:.1f} GB, less than a step needs: add --precision bf16-mixed or "
        "--checkpoint-activations, or lower --batch-per-domain; without them --micro-batch auto divides the step"
    ]


def largest_step(steps: Iterable[tuple[str, Config, int]]) -> list[str]:
    """The step that needs most memory, in words.

    Runs that differ neither in `DECIDING` nor in their images are counted once, and of each backbone only the largest
    batch: methods differ less. Methods whose steps depend on values are left out. A step is the name of a run, its
    settings, and its images.
    """
    kinds: dict[tuple[str, ...], tuple[int, str, Config]] = {}  # settings -> their largest batch
    for name, config, total in steps:
        key, images = tuple(repr(getattr(config, setting)) for setting in DECIDING), at_once(config, total)
        if key not in kinds or images > kinds[key][0]:
            kinds[key] = images, name, config
    counted: list[tuple[float, int, str, StepCost]] = []
    for key, (images, name, config) in kinds.items():
        if images == max(most for other, (most, *_) in kinds.items() if other[:4] == key[:4]):
            with suppress(ValueError):
                cost = step_cost(config)
                counted.append((cost.bytes(images), images, name, cost))
    if not counted:
        return []
    needed, images, name, cost = max(counted, key=lambda step: step[0])
    return [
        f"largest step: {needed / 1e9:.1f} GB and {cost.flops * images / 1e12:.1f} TFLOPs for {images} images at once "
        f"({cost.per_image / 1e6:.0f} MB per image): {name}",
        *_card_warning(needed, card_bytes()),
    ]

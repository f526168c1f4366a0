"""What a training costs, before it starts: memory and arithmetic of a step, counted, and time on this machine.

    cost = step_cost(config)
    cost.bytes(96)                # of a step in which 96 images go through the network at once

A step is counted on tensors that have shapes and no values (PyTorch's fake tensors, on the meta device): a second for
any backbone, and the same on every machine. Kernels that need other scratch space than a CPU's are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.diagnose.cost import DOMAINS, NUM_CLASSES, Rival, count_flops, random_batch, step_peak
from patchgen.fit.budget import measure, training_seconds
from patchgen.methods import make_method
from patchgen.methods.build import build_on, recompute_activations
from patchgen.model.backbone import BACKBONES, load_architecture
from patchgen.runs.precision import computes_bf16
from patchgen.tasks import make_fold
from patchgen.train.parts import indivisible

SIZES = 3, 6  # images of the steps whose memory is counted: it grows by the same number of bytes with each image
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # tensors that an optimiser keeps for each trained one
# settings that memory and arithmetic of a step depend on
DECIDING = ("backbone", "image_size", "precision", "checkpoint_activations", "tune", "lora_rank", "optimizer", "pool",
            "method", "hparams")  # fmt: skip


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
    """Memory and arithmetic of a step with these settings.

    Args:
        compute: Make the steps on the CPU, with random images, instead of only following their shapes.

    Raises:
        ValueError: the steps of this method depend on values, so they must be computed.
    """
    half = config.precision == "bf16-mixed" or (config.precision == "auto" and computes_bf16(config.accelerator))
    fake = nullcontext() if compute else FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        rival = make_step(config, compute)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                flops = count_flops(rival, random_batch(SIZES[1], config.image_size, "cpu")) / SIZES[1]
                small, large = (step_peak(rival, random_batch(size, config.image_size, "cpu")) for size in SIZES)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(f"method {config.method!r}: its steps depend on the values of a batch") from error
    per_image = (large - small) / (SIZES[1] - SIZES[0])
    trained = [p for part in (rival.model, rival.method) for p in part.parameters() if p.requires_grad]
    state = STATES[config.optimizer or rival.method.optimizer] * _bytes(trained)
    fixed = _bytes(rival.model.parameters()) + state + large - SIZES[1] * per_image
    return StepCost(fixed, per_image, flops, not indivisible(rival.method, rival.model))


def make_step(config: Config, compute: bool = True) -> Rival:
    """The method with its model, on the CPU; its optimiser is the simplest, whose state `step_cost` adds."""
    method = make_method(config)
    method.class_names = tuple(f"thing {number}" for number in range(NUM_CLASSES))
    method.sources = tuple(range(DOMAINS))
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
    trained = [p for part in (model, method) for p in part.parameters() if p.requires_grad]
    return Rival(method, model, torch.optim.SGD(trained or [{"params": []}], lr=1.0))


def _without_values(model: nn.Module) -> None:
    """Replace parameters and buffers by those of the active fake mode."""
    made: dict[int, torch.Tensor] = {}  # some modules share a parameter
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    learns = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if learns else empty
                if tensor is not None:
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


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


def card_bytes() -> int | None:
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


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
        *card_warning(cost["bytes"], cost["card_bytes"]),
    ]


def card_warning(needed: float, card: int | None) -> list[str]:
    if card is None or card >= needed:
        return []
    return [
        f"WARNING: this card has {card / 1e9:.1f} GB, less than a step needs: add --precision bf16-mixed or "
        "--checkpoint-activations, or lower --batch-per-domain; without them --micro-batch auto divides the step"
    ]


def largest_step(steps: Iterable[tuple[str, Config, int]]) -> list[str]:
    """The step that needs most memory, in words.

    Runs that differ neither in `DECIDING` nor in their images are counted once, and of each backbone only the largest
    batch: methods differ less. Methods whose steps depend on values are left out.

    Args:
        steps: The name of a run, its settings, and the images of a step.
    """
    batches: dict[str, dict[str, tuple[int, str, Config]]] = {}
    for name, config, images in steps:
        key = {setting: repr(getattr(config, setting)) for setting in DECIDING}
        where, what = (repr([key[setting] for setting in part]) for part in (DECIDING[:4], DECIDING[4:]))
        known = batches.setdefault(where, {}).get(what)
        if known is None or at_once(config, images) > known[0]:
            batches[where][what] = at_once(config, images), name, config
    counted = []
    for methods in batches.values():
        most = max(images for images, *_ in methods.values())
        for images, name, config in methods.values():
            if images == most:
                with suppress(ValueError):
                    cost = step_cost(config)
                    counted.append((cost.bytes(images), images, name, cost))
    if not counted:
        return []
    needed, images, name, cost = max(counted, key=lambda one: one[0])
    return [
        f"largest step: {needed / 1e9:.1f} GB and {cost.flops * images / 1e12:.1f} TFLOPs for {images} images at once "
        f"({cost.per_image / 1e6:.0f} MB per image): {name}",
        *card_warning(needed, card_bytes()),
    ]

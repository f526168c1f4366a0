"""What training steps cost, counted: parameters, arithmetic and memory, the same in every run and on every machine.

`step_cost` follows shapes alone (PyTorch's fake tensors, on the meta device): a second for any backbone. Kernels that
need other scratch space than a CPU's are not seen.
"""

import math
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.common.machine import computes_bf16
from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.fit.plan import measure, training_seconds
from patchgen.methods import Method, make_method
from patchgen.methods.build import build_on, recompute_activations
from patchgen.model.backbone import BACKBONES, load_architecture
from patchgen.model.classifier import Classifier
from patchgen.tasks import make_fold
from patchgen.train.loop import indivisible, plain_step

BASELINE = "lp-ln"
DOMAINS, NUM_CLASSES = 3, 7  # of a random batch
SIZES = 3, 6  # images of the steps whose memory is counted: it grows by the same number of bytes with each image
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # tensors that an optimiser keeps for each trained one
# settings that memory and arithmetic of a step depend on
COUNTED_BY = ("backbone", "image_size", "precision", "checkpoint_activations", "tune", "lora_rank", "optimizer", "pool",
              "method", "hparams")  # fmt: skip


# Steps


@dataclass
class Step:
    """A method with its model and optimiser, ready for steps."""

    method: Method
    model: Classifier
    optimizer: torch.optim.Optimizer
    number: int = 0

    def __call__(self, batch: Batch) -> None:
        """The whole step as in the trainer, with a given batch."""
        plain_step(self.method, self.model, self.optimizer, batch, self.number)
        self.number += 1


def make_step(config: Config, compute: bool = True) -> Step:
    """The method with its model; its optimiser is the simplest, whose state `step_cost` adds."""
    method = make_method(config)
    method.class_names = tuple(f"thing {number}" for number in range(NUM_CLASSES))
    method.sources = tuple(range(DOMAINS))
    named = config.backbone in BACKBONES  # others are read
    # not as fakes: initialisations ask for values
    with torch.device("meta") if named and not compute else nullcontext(), fake_tensor.unset_fake_temporarily():
        backbone = load_architecture(config.backbone, config.image_size)
        model = build_on(backbone, config, method, NUM_CLASSES)
    if not compute:
        _without_values(model)
    method.setup(model)
    if config.checkpoint_activations:
        recompute_activations(backbone, config.method, model.pool == "select")
    return Step(method, model, torch.optim.SGD([{"params": _trained(model, method)}], lr=1.0))


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


def random_batch(size: int, image_size: int, place: torch.device | str = "cpu") -> Batch:
    """`size` images, a multiple of `DOMAINS` for whole steps, sorted by domain."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(size, 3, image_size, image_size, generator=generator).to(place)
    index = torch.arange(size, device=image.device)
    domains = None if size % DOMAINS else DOMAINS
    return Batch(image, index % NUM_CLASSES, index * DOMAINS // size, index, num_domains=domains)


# What is counted


@dataclass(frozen=True)
class StepCost:
    """Of one training step."""

    trained: int  # parameters
    module: int  # parameters of the module that selects patches
    stored: int  # bytes of weights and of the optimiser's state
    fixed: float  # bytes of gradients, and of whatever else does not depend on the number of images
    per_image: float  # bytes
    flops: float  # per image
    divisible: bool  # whether `--micro-batch` may divide it

    def bytes(self, images: int) -> float:
        return self.stored + self.working(images)

    def working(self, images: int) -> float:
        """Peak bytes beyond the weights and the optimiser's state."""
        return self.fixed + self.per_image * images


def step_cost(config: Config, compute: bool = False) -> StepCost:
    """Memory and arithmetic of a step; ValueError if it depends on values, so that the CPU must `compute` it."""
    half = config.precision == "bf16-mixed" or (config.precision == "auto" and computes_bf16(config.accelerator))
    with nullcontext() if compute else fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        step = make_step(config, compute)
        small, large = (random_batch(size, config.image_size) for size in SIZES)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                flops = count_flops(step, large) / SIZES[1]
                peak, larger_peak = step_peak(step, small), step_peak(step, large)
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            raise ValueError(f"method {config.method!r}: its steps depend on the values of a batch") from error
    per_image = (larger_peak - peak) / (SIZES[1] - SIZES[0])
    trained, module = _trained(step.model, step.method), step.model.select
    state = STATES[config.optimizer or step.method.optimizer] * _bytes(trained)
    return StepCost(
        trained=sum(p.numel() for p in trained),
        module=sum(p.numel() for p in module.parameters()) if module else 0,
        stored=_bytes(step.model.parameters()) + state,
        fixed=larger_peak - SIZES[1] * per_image,
        per_image=per_image,
        flops=flops,
        divisible=not indivisible(step.method, step.model),
    )


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def compare_steps(source: str, method: str, image_size: int = 224, images: int = 4) -> dict[str, Any]:
    """A step of a method that tunes what LP+LN tunes, compared with one of LP+LN."""
    configs = [Config("random", "none", method=name, backbone=source, image_size=image_size, precision="32-true")
               for name in (BASELINE, method)]  # fmt: skip
    plain, ours = map(step_cost, configs)
    backbone = load_architecture(source, image_size)
    size = sum(p.numel() for p in backbone.parameters())
    methods = {
        name: {
            "trainable_parameters": cost.trained,
            "module_parameters": cost.module,
            "module_of_backbone": cost.module / size,
            "gflops_per_image": cost.flops / 1e9,
            "peak_bytes": cost.working(images),
            "ratio": {
                "flops": cost.flops / plain.flops, "peak_bytes": cost.working(images) / plain.working(images)
            },
        }
        for name, cost in ((BASELINE, plain), (method, ours))
    }  # fmt: skip
    return {
        "backbone": {"source": source, "resolved": backbone.resolved, "parameters": size}, "image_size": image_size,
        "patches": math.prod(backbone.grid(image_size)), "batch": images, "methods": methods,
    }  # fmt: skip


def of_module(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of `compare_steps` for the method that is compared with LP+LN."""
    return next(dict(counts) for name, counts in cost["methods"].items() if name != BASELINE)


def count_flops(step: Step, batch: Batch) -> int:
    """Matrix-product FLOPs of forward and backward, with attention unfused: the counter does not see fused products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        losses = step.method.losses(step.model(batch.image), batch)
        torch.autograd.backward(torch.stack(list(losses.values())).sum())
    step.optimizer.zero_grad()
    return counter.get_total_flops()


def step_peak(step: Step, batch: Batch) -> int:
    """Peak bytes of a step, beyond weights and images; the first step also allocates the optimiser state."""
    weights = [tensor for part in (step.model, step.method) for tensor in (*part.parameters(), *part.buffers())]
    with PeakMemory([batch.image, *weights]) as memory:
        step(batch)
    return memory.peak


class PeakMemory(TorchDispatchMode):
    """The bytes, `alive` and at the `peak`, of the storages that operations allocate besides `existing` ones."""

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
    """The step, of (name, settings, images), that needs most memory; of a backbone only its largest batch counts."""
    kinds: dict[tuple[str, ...], tuple[int, str, Config]] = {}  # settings -> their largest batch
    for name, config, total in steps:
        key, images = tuple(repr(getattr(config, setting)) for setting in COUNTED_BY), at_once(config, total)
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

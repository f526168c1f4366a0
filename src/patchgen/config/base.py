"""Settings of a run: one dataclass <-> one YAML file <-> the command's flags.

`Settings` has the fields that all tasks share; `fold.Config` and `stream.StreamConfig` add their own. The string after
a field is its help text. The settings that determine a run's results are hashed into its name; those in ``not_hashed``
only say where and how it is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import broken_rule, read_yaml, shortly

Tune = Literal["head", "layernorm", "upper-layernorm", "last_block", "full", "lora"]
Refine = Literal["linear", "ln-linear", "linear-ln"]
RhoStart = Literal["mean", "conv"]
LARGEST = 1e9  # maximum rate or weight: far beyond useful values, and far below the largest 32-bit float
RATE, AT_LEAST_1 = (0, LARGEST), (1, math.inf)


@dataclass(frozen=True)
class Settings:
    """The settings common to all tasks."""

    data: str
    _: KW_ONLY
    task: str
    """The task."""
    method: str
    """A name of `patchgen methods`."""
    pool: str | None = None
    """Which feature the head reads; by default the method's choice."""
    tune: Tune | None = None
    """Which part of the backbone is trained; by default the method's choice."""
    backbone: str = "auto"
    """Alias, hub id, local folder, .safetensors file, or `auto`."""
    image_size: int = 224
    """Images are resized to this square, in pixels."""
    normalization: Literal["backbone", "imagenet"] = "backbone"
    """Pixel mean and standard deviation: the backbone's, or ImageNet's for all, as in DomainBed."""
    holdout: float = 0.2
    """Share of the images to hold out."""
    val_images: int | None = None
    """Maximum number of validation images; the whole held-out part by default."""

    lr: float = 5e-5
    """Learning rate of the head, and the default of the other learning rates."""
    lr_module: float | None = None
    """Learning rate of the PatchGen module; by default that of the head."""
    weight_decay: float = 0.0
    """The optimiser's weight decay."""
    lambda_ms: float = 1e-3
    """Weight of low-score mask suppression, L_ms."""
    lambda_sim: float = 1e-3
    """Weight of class-conditional similarity, L_sim."""
    lambda_conf: float = 1.0
    """Weight of selected confidence, L_conf (the paper's is 1)."""
    tau: float = 0.25
    """Mask entries below this are weak."""
    refine: Refine = "ln-linear"
    """The refinement map F of the module."""
    rho_start: RhoStart = "mean"
    """Start of the module's aggregator rho: the mean over patches, or a convolution's default."""
    spread: float = 0.35
    """Standard deviation of the module's scores at the start, on source images."""

    seed: int = 1
    """Seed of batches, augmentation and initial weights."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    threads: int | None = None
    """CPU threads, at most 32 per core; recorded, because results depend on it in the last digits."""
    cache: bool = True
    """Keep decoded pixels on disk ($PATCHGEN_CACHE)."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """Precision of the training step; `auto`: bf16-mixed where the device has native bfloat16, else 32-true."""
    micro_batch: Literal["auto"] | int | None = None
    """Maximum images that a device processes at once, for the same gradients; by default `auto`: what fits on a GPU."""

    selection_rule: ClassVar[str]  # the setting that selects the reported checkpoint
    not_hashed: ClassVar[tuple[str, ...]] = ("data", "accelerator", "threads", "cache", "micro_batch")
    always_hashed: ClassVar[tuple[str, ...]] = ()  # hashed even at their default
    # Beyond these a run cannot start, or numbers are far from useful: least and most of a number, both included.
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "image_size": (1, 16384), "val_images": AT_LEAST_1, "threads": (1, 1024), "micro_batch": AT_LEAST_1,
        "seed": (0, 2**32 - 1),
        **dict.fromkeys(("lr", "lr_module", "weight_decay", "lambda_ms", "lambda_sim", "lambda_conf", "spread"), RATE),
    }  # fmt: skip

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check for contradictory settings before any work is done.

        Raises:
            ValueError: its first word is the setting.
        """
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            if rule := broken_rule(value, hint, self.bounds.get(name) if isinstance(value, dict) else None):
                raise ValueError(f"{name} must be {rule}, not {shortly(value)}{_fix(value, hint)}")
        for name, (low, high) in self.bounds.items():
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not low <= value <= high:
                rule = f"at least {low:g}" if value < low else f"at most {high:.10g}"
                raise ValueError(f"{name} must be {rule}, not {value}")
        if not 0 < self.tau < 1:
            raise ValueError(f"tau is a mask value between 0 and 1, not {self.tau}")

    def images_at_once(self, batch: int) -> int | None:
        """`micro_batch` for a step of `batch` images on a device; None: to be found by trying."""
        return self.micro_batch if isinstance(self.micro_batch, int) else None

    def likeness(self) -> tuple[Any, ...]:
        """Runs with the same value cost about the same."""
        raise NotImplementedError

    def images_seen(self) -> float:
        """Number of training images that a run processes, estimated from the settings."""
        raise NotImplementedError

    def deciding(self) -> dict[str, Any]:
        """The settings that determine the results."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in self.not_hashed}

    def hashed(self) -> dict[str, Any]:
        """The settings that are hashed into a run's name: those that differ from their default.

        So a setting added later does not rename existing runs.
        """
        usual = {f.name: _default(f) for f in dataclasses.fields(self)}
        return {k: v for k, v in self.deciding().items() if k in self.always_hashed or v != usual[k]}


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default; an empty string if it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "" if field.default is dataclasses.MISSING else field.default


def read_settings(path: str | Path) -> dict[str, Any]:
    """The `name: value` lines of a YAML file, unchecked."""
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings as `name: value` lines, found {type(settings).__name__}")
    return settings


def dump_config(config: Any) -> str:
    """The YAML text of a dataclass of settings."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def known_settings(kind: Any, settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The same settings, checked: all known to the dataclass `kind`, and none of the required ones missing."""
    fields = dataclasses.fields(kind)
    names = [f.name for f in fields]
    for key in settings:
        if key not in names:
            raise ValueError(f"{where}: unknown setting {shortly(key)}{did_you_mean(str(key)[:100], names)}")
    nothing = dataclasses.MISSING
    required = [f.name for f in fields if f.default is nothing and f.default_factory is nothing]
    missing = [name for name in required if name not in settings]
    if missing:
        raise ValueError(f"{where}: the settings {', '.join(missing)} are required")
    return settings


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's settings, cached because resolving them is slower than checking all settings."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fix(value: Any, hint: Any) -> str:
    """What to write instead: a name that is misspelt, a domain that YAML reads as a number, or `1e-3`, as text."""
    members = get_args(hint) or (hint,)
    words = [word for member in (hint, *members) if get_origin(member) is Literal for word in get_args(member)]
    if words:
        return did_you_mean(shortly(value), words)
    if float in members and isinstance(value, str):
        return "; YAML needs a decimal point before an exponent: 1.0e-3"
    return "; put it in quotes" if str in members and not isinstance(value, dict) else ""

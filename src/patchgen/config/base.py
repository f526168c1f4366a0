"""Settings of a run: one dataclass <-> one YAML file <-> the command's flags.

`Settings` has the fields that all tasks share; `fold.Config` and `stream.StreamConfig` add their own. The string after
a field is its help text. The settings that determine a run's results are hashed into its name; those in ``not_hashed``
only say where and how it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import read_yaml, shortly

Tune = Literal["head", "layernorm", "upper-layernorm", "last_block", "full", "lora"]
Refine = Literal["linear", "ln-linear", "linear-ln"]
RhoStart = Literal["mean", "conv"]
S = TypeVar("S", bound="Settings")


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
    least: ClassVar[Mapping[str, int]] = {"image_size": 1, "val_images": 1, "threads": 1, "micro_batch": 1, "seed": 0}
    not_negative: ClassVar[tuple[str, ...]] = (
        "lr", "lr_module", "weight_decay", "lambda_ms", "lambda_sim", "lambda_conf", "spread"
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check for contradictory settings before any work is done.

        Raises:
            ValueError: its first word is the setting.
        """
        _check_kinds(self)
        _check_range(self)
        for name in self.not_negative:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LARGEST:
                rule = f"at most {LARGEST:g}" if LARGEST < value < float("inf") else "a non-negative number"
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


# Beyond these a run cannot start: generators accept 63 bits of seed and step, and threads are limited by the system.
MOST = {"seed": 2**32 - 1, "image_size": 16384, "threads": 1024, "devices": 1024}
LARGEST = 1e9  # maximum rate or weight: far beyond useful values, and far below the largest 32-bit float
KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text (in quotes)"}


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default; an empty string if it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "" if field.default is dataclasses.MISSING else field.default


def from_file(kind: type[S], path: str | Path, changes: Mapping[str, Any], found: Mapping[str, Any] | None = None) -> S:
    """The settings `kind` of a file; errors name the file.

    Args:
        found: the result of `read_settings`, if the file has already been read.
    """
    settings = known_settings(kind, {**(read_settings(path) if found is None else found), **changes}, str(path))
    try:
        return kind(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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


def _check_range(config: Settings) -> None:
    """Check minimum and maximum values; None means that a setting was left out."""
    for name, lowest in config.least.items():
        value = getattr(config, name)
        if value is not None and not isinstance(value, str) and not value >= lowest:
            raise ValueError(f"{name} must be at least {lowest}, not {value}")
    for name, highest in MOST.items():
        if (getattr(config, name, None) or 0) > highest:
            raise ValueError(f"{name} must be at most {highest}, not {getattr(config, name)}")


def _check_kinds(config: Settings) -> None:
    """Check types: a misspelt choice, a domain that YAML reads as a number, `1e-3`, which it reads as text."""
    fields = {field.name for field in dataclasses.fields(config)}
    for name, hint in _hints(type(config)).items():
        if name not in fields:
            continue
        value, kinds = getattr(config, name), get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
        if value in words or (value is None and type(None) in kinds):
            continue
        [kind, *_] = [each for each in kinds if each is not type(None) and get_origin(each) is not Literal] or [None]
        if kind is None:
            fix = did_you_mean(shortly(value), words)
            raise ValueError(f"{name} must be one of {', '.join(words)}, not {shortly(value)}{fix}")
        if kind in KINDS and not _fits(value, kind):
            fix = "; YAML needs a decimal point before an exponent: 1.0e-3" if kind is float else ""
            rule = " or ".join([KINDS[kind], *words])
            raise ValueError(f"{name} must be {rule}, not {shortly(value)}{fix}")
        if get_origin(kind) is dict:
            _check_dict(name, value, get_args(kind)[1])


_known_hints: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's attributes, cached because resolving them is slower than checking all settings."""
    if kind not in _known_hints:
        _known_hints[kind] = get_type_hints(kind)
    return _known_hints[kind]


def _check_dict(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be `name: value` lines, not {shortly(value)}")
    for key, item in value.items():
        if not isinstance(key, str) or not _fits(item, kind):
            raise ValueError(
                f"{name}: each value must be {KINDS[kind]} under a name, not {shortly(key)}: {shortly(item)}"
            )
        if kind is float and not abs(item) <= LARGEST:
            raise ValueError(f"{name}: {key} must be a number of at most {LARGEST:g}, not {item}")


def _fits(value: Any, kind: type) -> bool:
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)

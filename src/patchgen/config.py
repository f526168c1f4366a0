"""Every setting of a run: one dataclass <-> one YAML file <-> the command's flags.

A field is followed by the sentence that becomes its help. A run is named by the hash of the settings that decide its
numbers; the others (``NOT_HASHED``) say only where and how it is computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from patchgen.names import did_you_mean

Pool = Literal["cls", "mean", "patchgen"]
Tune = Literal["head", "layernorm", "last_block", "full"]
Refine = Literal["linear", "ln-linear", "linear-ln"]
Selection = Literal["source-validation", "last", "oracle"]
SplitRule = Literal["domainbed", "group"]


@dataclass(frozen=True)
class Config:
    data: str
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    unseen: str
    """The domain that is left out of training and scored at the end."""
    method: str = "patchgen"
    """lp, lp-ln, full, patchgen or patchgen-no-losses (`patchgen methods` lists all)."""
    pool: Pool | None = None
    """What the head reads; the method's own choice when left out."""
    tune: Tune | None = None
    """What of the backbone is trained; the method's own choice when left out."""
    backbone: str = "auto"
    """Alias, hub id, local folder, .safetensors file, or `auto`."""
    benchmark: str | None = None
    """Read DATA as this registered benchmark; recognised by the folder name when left out."""
    options: dict[str, str] = field(default_factory=dict)
    """Reading options of a benchmark, such as `crctp_fold Fold1`."""

    image_size: int = 224
    """Images are resized to this square, in pixels."""
    steps: int = 5001
    """Optimiser steps; the first is step 0."""
    batch_per_domain: int = 32
    """Images drawn from each source domain at each step."""
    eval_every: int = 200
    """Source validation happens at step 0, at every such step and at the last."""
    val_images: int | None = None
    """At most so many validation images a domain; all of the held-out part when left out."""
    normalization: Literal["backbone", "imagenet"] = "backbone"
    """Pixel mean and deviation: the backbone's own, or ImageNet's for all as in the lineage."""
    augment: bool = True
    """Random crop, flip and colours while training."""
    split: SplitRule = "domainbed"
    """How a domain is split: the field's rule, or `group` (a patient is never on both sides)."""
    holdout: float = 0.2
    """Share of each domain that is held out."""

    lr: float = 5e-5
    """Adam's learning rate of the head (and of what follows, when left out)."""
    lr_module: float | None = None
    """Learning rate of the PatchGen module."""
    lr_backbone: float | None = None
    """Learning rate of the tuned part of the backbone."""
    weight_decay: float = 0.0
    """Adam's weight decay."""
    accumulate: int = 1
    """Micro-batches a step is divided into; L_ms and L_sim are then means over a micro-batch."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Number format of the training step."""

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

    swad: bool = False
    """Average weights over the loss valley and report that model beside the selected one."""
    swad_ratio: float | None = None
    """Tolerance of the valley; the benchmark's own (1.3, VLCS 1.2) when left out."""
    swad_compat: bool = False
    """Follow the original SWAD implementation to the letter instead of its published rule."""
    select: Selection = "source-validation"
    """Which checkpoint is reported. `oracle` looks at the unseen domain and is labelled so."""
    seed: int = 1
    """Seed of splits, batches, augmentation and initial weights."""

    devices: int = 1
    """How many devices share a step."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    threads: int | None = None
    """CPU threads; results change with it in the last digits, so it is recorded."""
    cache: bool = True
    """Keep decoded pixels on disk ($PATCHGEN_CACHE)."""

    def __post_init__(self) -> None:
        _check(self)

    def hash(self, data_fingerprint: str) -> str:
        """Name of the run: a digest of what decides its numbers, with the data's rows in place of its path.

        Settings at their default are left out, so that a setting added later does not rename the runs of today.
        """
        usual = Config("", "")
        settings = {k: v for k, v in self.deciding().items() if v != getattr(usual, k)}
        text = json.dumps({**settings, "data": data_fingerprint}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the numbers."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in NOT_HASHED}


NOT_HASHED = ("data", "devices", "accelerator", "threads", "cache")

LEAST = dict.fromkeys(("steps", "batch_per_domain", "eval_every", "val_images", "accumulate", "devices", "threads"), 1)
LEAST |= {"swad_ratio": 1, "seed": 0}
KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text (in quotes)"}

PRESETS: dict[str, dict[str, Any]] = {
    # The lineage's protocol (DomainBed -> SWAD -> MIRO -> GMDG -> L-Reg): hours on a GPU, days on a CPU.
    "paper": {"normalization": "imagenet"},
    # A fold in minutes on two cores.
    "small": {
        "image_size": 112,
        "steps": 151,
        "batch_per_domain": 12,
        "eval_every": 25,
        "val_images": 100,
    },
}

# One search for every method alike, on source validation: docs/decisions.md, "Learning rates of the small preset".
SMALL_LR = {"patchgen": 1e-3, "patchgen-no-losses": 1e-3, "patchgen-true-mask": 1e-3}
SMALL_LR_OTHERS = 3e-3


def preset_settings(preset: str, method: str) -> dict[str, Any]:
    """What a preset sets for a method."""
    settings = dict(PRESETS.get(preset, {}))
    if preset == "small":
        settings["lr"] = SMALL_LR.get(method, SMALL_LR_OTHERS)
    return settings


def load_config(path: str | Path, **changes: Any) -> Config:
    """Read a YAML file of settings; unknown keys are refused with the nearest known one."""
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings as `name: value` lines, found {type(settings).__name__}")
    return Config(**_known({**settings, **changes}, str(path)))


def dump_config(config: Config) -> str:
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _known(settings: dict[str, Any], where: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(Config)]
    for key in settings:
        if key not in names:
            raise ValueError(f"{where}: unknown setting {key!r}{did_you_mean(str(key), names)}")
    missing = [name for name in ("data", "unseen") if name not in settings]
    if missing:
        raise ValueError(f"{where}: the settings {', '.join(missing)} are required")
    return settings


def _check(config: Config) -> None:
    """Refuse settings that contradict each other before any work is done."""
    _check_kinds(config)
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    for name in ("lr", "lr_module", "lr_backbone", "weight_decay", "lambda_ms", "lambda_sim", "lambda_conf"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number that is not negative, not {value}")
    if not 0 < config.holdout < 1:
        raise ValueError(f"holdout is a share between 0 and 1, not {config.holdout}")
    if not 0 < config.tau < 1:
        raise ValueError(f"tau is a mask value between 0 and 1, not {config.tau}")
    parts = config.accumulate * config.devices
    if config.batch_per_domain % parts:
        raise ValueError(
            f"batch_per_domain {config.batch_per_domain} must divide by devices x accumulate = {parts}; "
            f"try {parts * max(1, round(config.batch_per_domain / parts))}"
        )


def _check_kinds(config: Config) -> None:
    """A file may hold anything: a misspelt choice, a domain that YAML reads as a number, `1e-3`, which it does not."""
    for name, hint in get_type_hints(Config).items():
        value, inner = getattr(config, name), get_args(hint)
        kind = inner[0] if type(None) in inner else hint
        if value is None and kind is not hint:
            continue
        if get_origin(kind) is Literal and value not in get_args(kind):
            fix = did_you_mean(str(value), get_args(kind))
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}{fix}")
        if kind in KINDS and not _fits(value, kind):
            fix = "; YAML reads an exponent only behind a point: 1.0e-3" if kind is float else ""
            raise ValueError(f"{name} must be {KINDS[kind]}, not {value!r}{fix}")


def _fits(value: Any, kind: type) -> bool:
    if kind is str:  # what a command still has to fill in is no text yet
        return not isinstance(value, (int, float))
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)

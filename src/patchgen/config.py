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
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from patchgen import plugins
from patchgen.names import did_you_mean

Pool = Literal["cls", "mean", "patchgen", "select"]
Tune = Literal["head", "layernorm", "last_block", "full"]
Refine = Literal["linear", "ln-linear", "linear-ln"]
Selection = Literal["source-validation", "last", "oracle"]
SplitRule = Literal["domainbed", "group"]
Task = Literal["mdg", "mdg_gcd"]
Settings = TypeVar("Settings")  # a dataclass of settings
NO_DOMAIN = "none"  # as `unseen`: nothing is left out


@dataclass(frozen=True)
class Config:
    data: str
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    unseen: str
    """The domain that is left out of training and scored at the end; `none` trains on all and scores nothing."""
    task: Task = "mdg"
    """`mdg`: an unseen domain. `mdg_gcd`: unlabelled classes too. For `ccd`, classes over time: `--task ccd --help`."""
    method: str = "patchgen"
    """A name of `patchgen methods`; with `+` the terms of others are added, as in patchgen+miro."""
    hparams: dict[str, float] = field(default_factory=dict)
    """The method's own hyper-parameters, such as `miro 0.01` (`patchgen methods` lists them)."""
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
    """Random changes of the images while training."""
    augmentation: Literal["natural", "histology"] = "natural"
    """Which: crop, flip and colours, or for stained tissue quarter turns, mirror images and strength of the stains."""
    split: SplitRule = "domainbed"
    """How a domain is split: the field's rule, or `group` (within a domain, a patient is never on both sides)."""
    holdout: float = 0.2
    """Share of each domain that is held out."""

    known: str = "lreg"
    """mdg_gcd: classes with labels: `lreg` (the first half and one more), `half`, or names with commas between."""
    unlabelled: Literal["unknown", "mixed"] = "unknown"
    """mdg_gcd: the unlabelled images are of unknown classes only, or of known ones too."""
    labelled_share: float = 0.5
    """mdg_gcd: with `mixed`, the share of known-class images that keep their label."""
    num_classes: int | None = None
    """mdg_gcd: how many classes there are in all, known and new; the true number when left out."""

    lr: float = 5e-5
    """Adam's learning rate of the head (and of what follows, when left out)."""
    lr_module: float | None = None
    """Learning rate of the PatchGen module."""
    lr_backbone: float | None = None
    """Learning rate of the tuned part of the backbone."""
    weight_decay: float = 0.0
    """Adam's weight decay."""
    dropout: float = 0.0
    """Share of the head's inputs that are dropped while training."""
    accumulate: int = 1
    """Micro-batches a step is divided into; L_ms and L_sim are then means over a micro-batch."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Number format of the training step."""
    clip_gradients: float | None = None
    """Largest norm of a step's gradient, all trained tensors together; a longer one is scaled down to it."""
    checkpoint_activations: bool = False
    """Keep of a block of the backbone its input alone and compute it again for the gradients: less memory, slower."""
    compile: bool = False
    """Compile the blocks of the backbone for the training step; where that fails, the run goes on without it."""

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
    deterministic: bool = False
    """Use operations that give the same bits each time, also on a GPU; one without such a form is warned of."""
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
        return run_hash(settings, data_fingerprint, plugins.used_by(self))

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the numbers."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in NOT_HASHED}


def run_hash(settings: dict[str, Any], data_fingerprint: str, used: list[dict[str, str]]) -> str:
    """A digest of settings, data and plug-ins. Of a local backbone or file what is in it counts, not where it lies."""
    from patchgen.model.local import content

    if digest := content(settings.get("backbone", "")):
        settings = {**settings, "backbone": digest}
    if used:
        settings = {**settings, "plugins": [p["version"] if p["name"].endswith(".py") else p["name"] for p in used]}
    text = json.dumps({**settings, "data": data_fingerprint}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


NOT_HASHED = ("data", "devices", "accelerator", "threads", "deterministic", "cache", "checkpoint_activations")

LEAST = dict.fromkeys(("steps", "batch_per_domain", "eval_every", "val_images", "accumulate", "devices", "threads"), 1)
LEAST |= {"swad_ratio": 1, "seed": 0, "num_classes": 1, "image_size": 1}
# Beyond these a run cannot start: generators take 63 bits of seed and step, and a system has so many threads.
MOST = {"seed": 2**32 - 1, "image_size": 16384, "threads": 1024, "devices": 1024}
LARGEST = 1e9  # of a rate or weight: far beyond what trains, and far below what a 32-bit number holds
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


def load_config(path: str | Path, **changes: Any) -> Config:
    """Read a YAML file of settings; unknown keys are refused with the nearest known one."""
    return from_file(Config, path, changes)


def from_file(kind: type[Settings], path: str | Path, changes: dict[str, Any]) -> Settings:
    """The dataclass `kind` of a file's settings; whatever is wrong with them, the error names the file."""
    settings = known_settings(kind, {**read_settings(path), **changes}, str(path))
    try:
        return kind(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_settings(path: str | Path) -> dict[str, Any]:
    """The `name: value` lines of a YAML file, whatever they are."""
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # also a date such as 2024-13-45
        raise ValueError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings as `name: value` lines, found {type(settings).__name__}")
    return settings


def dump_config(config: Any) -> str:
    """The YAML text of a dataclass of settings."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def known_settings(kind: Any, settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The same settings, if the dataclass `kind` has all of them and they have all that it requires."""
    fields = dataclasses.fields(kind)
    names = [f.name for f in fields]
    for key in settings:
        if key not in names:
            raise ValueError(f"{where}: unknown setting {key!r}{did_you_mean(str(key), names)}")
    nothing = dataclasses.MISSING
    required = [f.name for f in fields if f.default is nothing and f.default_factory is nothing]
    missing = [name for name in required if name not in settings]
    if missing:
        raise ValueError(f"{where}: the settings {', '.join(missing)} are required")
    return settings


def _check(config: Config) -> None:
    """Refuse settings that contradict each other before any work is done."""
    check_kinds(config)
    check_least(config, LEAST)
    for name in ("lr", "lr_module", "lr_backbone", "weight_decay", "lambda_ms", "lambda_sim", "lambda_conf"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number that is not negative, not {value}")
        if value is not None and value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:g}, not {value}")
    if not 0 < config.holdout < 1:
        raise ValueError(f"holdout is a share between 0 and 1, not {config.holdout}")
    if not 0 < config.labelled_share <= 1:
        raise ValueError(f"labelled_share is a share above 0 and at most 1, not {config.labelled_share}")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is a share from 0 to below 1, not {config.dropout}")
    if config.clip_gradients is not None and not 0 < config.clip_gradients < float("inf"):
        raise ValueError(f"clip_gradients is a norm above 0, such as 1.0, not {config.clip_gradients}")
    if not 0 < config.tau < 1:
        raise ValueError(f"tau is a mask value between 0 and 1, not {config.tau}")
    parts = config.accumulate * config.devices
    if config.batch_per_domain % parts:
        raise ValueError(
            f"batch_per_domain {config.batch_per_domain} must divide by devices x accumulate = {parts}; "
            f"try {parts * max(1, round(config.batch_per_domain / parts))}"
        )


def check_least(config: Any, least: dict[str, int]) -> None:
    """Refuse settings below their least value, or above their most; None means that a setting was left out."""
    for name, lowest in least.items():
        value = getattr(config, name)
        if value is not None and not value >= lowest:
            raise ValueError(f"{name} must be at least {lowest}, not {value}")
    for name, highest in MOST.items():
        if (getattr(config, name, None) or 0) > highest:
            raise ValueError(f"{name} must be at most {highest}, not {getattr(config, name)}")


def check_kinds(config: Any) -> None:
    """A file may hold anything: a misspelt choice, a domain that YAML reads as a number, `1e-3`, which it does not."""
    for name, hint in get_type_hints(type(config)).items():
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
        if get_origin(kind) is dict:
            _check_dict(name, value, get_args(kind)[1])


def _check_dict(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be `name: value` lines, not {value!r}")
    for key, item in value.items():
        if not isinstance(key, str) or not _fits(item, kind):
            raise ValueError(f"{name}: each value must be {KINDS[kind]} under a name, not {key!r}: {item!r}")
        if kind is float and not abs(item) <= LARGEST:
            raise ValueError(f"{name}: {key} must be a number of at most {LARGEST:g}, not {item}")


def _fits(value: Any, kind: type) -> bool:
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)

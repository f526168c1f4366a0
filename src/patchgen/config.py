"""Settings of a run: one dataclass <-> one YAML file <-> the command's flags.

`Settings` has the fields that all tasks share, `Config` those of runs that leave a domain out; `ccd.settings` has those
of streams. The string after a field is its help text.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import broken_rule, outside, read_yaml, shortly

Pool = Literal["cls", "mean", "cls-mean", "patchgen", "patchgen-cls", "select"]
Tune = Literal["head", "layernorm", "upper-layernorm", "last_block", "full", "lora"]
Refine = Literal["linear", "ln-linear", "linear-ln"]
RhoStart = Literal["mean", "conv"]
Selection = Literal["source-validation", "leave-one-out", "last", "oracle"]
SplitRule = Literal["domainbed", "group"]
Task = Literal["mdg", "mdg_gcd"]
USUAL_SOURCES = 3  # source domains of a typical benchmark
NO_DOMAIN = "none"  # value of `unseen`: nothing is left out
COUNT = "[1, inf]"
RATE = "[0, 1e9]"  # far beyond useful values, and far below the largest 32-bit float


@dataclass(frozen=True)
class Settings:
    """The settings common to all tasks; those without a text have one for each task."""

    data: str
    _: KW_ONLY
    task: str
    method: str
    pool: str | None = None
    tune: Tune | None = None
    """Which part of the backbone is trained; by default the method's choice."""
    backbone: str = "auto"
    """Alias, hub id, local folder, .safetensors file, or `auto`."""
    image_size: int = 224
    """Images are resized to this square, in pixels."""
    normalization: Literal["backbone", "imagenet"] = "backbone"
    """Pixel mean and standard deviation: the backbone's, or ImageNet's for all, as in DomainBed."""
    holdout: float = 0.2
    val_images: int | None = None

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
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    threads: int | None = None
    """CPU threads, at most 32 per core; recorded, because results depend on it in the last digits."""
    cache: bool = True
    """Keep decoded pixels on disk ($PATCHGEN_CACHE)."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """Precision of the training step; `auto` (preset small): bf16-mixed where the device computes it natively."""
    micro_batch: Literal["auto"] | int | None = None
    """Maximum images that a device processes at once, for the same gradients; by default `auto`: what fits on a GPU."""

    selection_rule: ClassVar[str]  # the setting that selects the reported checkpoint
    # Only say where and how a run is computed; all others are hashed into its name.
    not_hashed: ClassVar[tuple[str, ...]] = ("data", "accelerator", "threads", "cache", "micro_batch")
    always_hashed: ClassVar[tuple[str, ...]] = ()  # hashed even at their default
    bounds: ClassVar[Mapping[str, str]] = {  # intervals; beyond them a run cannot start, or its numbers are useless
        "image_size": "[1, 16384]", "val_images": COUNT, "threads": "[1, 1024]", "micro_batch": COUNT,
        "seed": f"[0, {2**32 - 1}]", "tau": "(0, 1)",
        **dict.fromkeys(("lr", "lr_module", "weight_decay", "lambda_ms", "lambda_sim", "lambda_conf", "spread"), RATE),
    }  # fmt: skip

    def __post_init__(self) -> None:
        """Check the settings; the first word of a ValueError is the setting."""
        for name, hint in _hints(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if rule := broken_rule(value, hint):
                raise ValueError(f"{name} must be {rule}, not {shortly(value)}{_fix(value, hint)}")
        for name, interval in self.bounds.items():
            value = getattr(self, name)
            for number in value.values() if isinstance(value, dict) else [value]:
                if isinstance(number, (int, float)) and (rule := outside(number, interval)):
                    raise ValueError(f"{name} must be {rule}, not {shortly(value)}")

    def images_at_once(self, batch: int) -> int | None:
        """`micro_batch` for a step of `batch` images on a device; None: to be found by trying."""
        parts = getattr(self, "accumulate", 1)
        if self.micro_batch is None and parts > 1:
            return -(-batch // parts)
        return self.micro_batch if isinstance(self.micro_batch, int) else None

    def cost_key(self) -> tuple[Any, ...]:
        """Runs with the same value cost about the same."""
        raise NotImplementedError

    def images_seen(self) -> float:
        """Number of training images that a run processes, estimated from the settings."""
        raise NotImplementedError

    def result_settings(self) -> dict[str, Any]:
        """The settings that determine the results."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in self.not_hashed}

    def hashed(self) -> dict[str, Any]:
        """The settings that are hashed into a run's name: those that differ from their default.

        So a setting added later does not rename existing runs.
        """
        defaults = {f.name: "" if (value := default_of(f)) is dataclasses.MISSING else value
                    for f in dataclasses.fields(self)}  # fmt: skip
        return {k: v for k, v in self.result_settings().items() if k in self.always_hashed or v != defaults[k]}


@dataclass(frozen=True)
class Config(Settings):
    """A run that leaves one domain out (tasks `mdg` and `mdg_gcd`)."""

    data: str
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    unseen: str
    """The domain that is left out of training and scored at the end; `none` trains on all and scores nothing."""
    _: KW_ONLY
    task: Task = "mdg"
    """`mdg`: an unseen domain. `mdg_gcd`: unlabelled classes too. For `ccd`, classes over time: `--task ccd --help`."""
    method: str = "patchgen"
    """A name of `patchgen methods`; `+` adds the terms of another, as in patchgen+miro."""
    hparams: dict[str, float] = field(default_factory=dict)
    """Hyper-parameters of the method, such as `miro 0.01` (`patchgen methods` lists them)."""
    pool: Pool | None = None
    """Which feature the head reads; by default the method's choice."""
    benchmark: str | None = None
    """Read DATA as this registered benchmark; by default recognised by the folder name."""
    options: dict[str, str] = field(default_factory=dict)
    """Reading options of a benchmark, such as `crctp_fold Fold1`."""

    steps: int = 5001
    """Optimiser steps; the first is step 0."""
    batch_per_domain: int = 32
    """Images drawn from each source domain at each step."""
    eval_every: int = 200
    """Steps between evaluations on source validation; also at step 0 and at the last step."""
    val_images: int | None = None
    """Maximum validation images per domain; the whole held-out part by default."""
    augment: bool = True
    """Augment the training images."""
    augmentation: Literal["natural", "crop-flip", "histology"] = "natural"
    """Crop, flip and colour jitter; crop and flip; for stained tissue: 90 degree rotations, flips, stain jitter."""
    stain: Literal["none", "macenko"] = "none"
    """For stained tissue: give every image the stain colours of the training images (extra `stain`)."""
    split: SplitRule = "domainbed"
    """How a domain is split: DomainBed's rule, or `group` (within a domain, no patient appears on both sides)."""
    holdout: float = 0.2
    """Share of each domain to hold out."""

    known: str = "lreg"
    """mdg_gcd: classes with labels: `lreg` (the first half plus one), `half`, or comma-separated names."""
    unlabelled: Literal["unknown", "mixed"] = "unknown"
    """mdg_gcd: the unlabelled images are of unknown classes only, or of known ones too."""
    labelled_share: float = 0.5
    """mdg_gcd: with `mixed`, the share of known-class images that keep their label."""
    num_classes: int | None = None
    """mdg_gcd: total number of classes, known and new; by default the true number."""

    lr_backbone: float | None = None
    """Learning rate of the tuned part of the backbone."""
    optimizer: Literal["adam", "adamw", "sgd"] | None = None
    """The optimiser; by default the method's (mostly Adam)."""
    lr_schedule: Literal["constant", "cosine"] | None = None
    """Learning rate schedule: constant, or a cosine to 0; by default the method's."""
    warmup: int = 0
    """Steps in which the learning rates rise linearly to their full value, before the schedule."""
    class_weights: Literal["balanced"] | None = None
    """`balanced`: each class has the same share of the main loss, regardless of its number of images."""
    lora_rank: int = 8
    """Rank of the updates that `--tune lora` trains."""
    dropout: float = 0.0
    """Dropout rate of the head's inputs."""
    accumulate: int = 1
    """Of runs of earlier versions: the number of parts of a step. Use `micro_batch`."""
    clip_gradients: float | None = None
    """Clip the global gradient norm at this value."""
    checkpoint_activations: bool = False
    """Activation checkpointing in the backbone's blocks: less memory, slower, the same results."""
    compile: bool = False
    """torch.compile the backbone's blocks for training; if that fails, the run continues without it."""

    swad: bool = False
    """Also average the weights over the loss valley (SWAD) and report that model."""
    swad_ratio: float | None = None
    """Tolerance of the valley; by default the benchmark's (1.3, VLCS 1.2)."""
    swad_compat: bool = False
    """Follow the original SWAD implementation exactly, instead of its published rule."""
    patience: int | None = None
    """Stop after this many evaluations without an improvement on source validation; by default never."""
    select: Selection = "source-validation"
    """Which checkpoint is reported. `leave-one-out`: by trainings without each source, too. `oracle` uses the unseen
    domain, and results are labelled accordingly."""
    seed: int = 1
    """Seed of splits, batches, augmentation and initial weights."""

    devices: int = 1
    """Number of devices that share a step (DDP)."""
    deterministic: bool = False
    """Use deterministic kernels, also on a GPU; warns where none exists."""

    selection_rule: ClassVar = "select"
    not_hashed: ClassVar = (*Settings.not_hashed, "devices", "deterministic", "checkpoint_activations")
    bounds: ClassVar = {
        **Settings.bounds,
        **dict.fromkeys(("steps", "batch_per_domain", "eval_every", "accumulate", "num_classes"), COUNT),
        **dict.fromkeys(("patience", "lora_rank", "swad_ratio"), COUNT),
        "devices": "[1, 1024]", "warmup": "[0, inf]", "lr_backbone": RATE, "hparams": "[-1e9, 1e9]",
        "holdout": "(0, 1)", "labelled_share": "(0, 1]", "dropout": "[0, 1)", "clip_gradients": "(0, inf]",
    }  # fmt: skip

    def cost_key(self) -> tuple[Any, ...]:
        size = self.steps, self.batch_per_domain, self.image_size
        return (self.task, *size, self.backbone, self.eval_every, self.select == "leave-one-out")

    def images_seen(self) -> float:
        trainings = USUAL_SOURCES if self.select == "leave-one-out" else 1  # each of the others has a source less
        return float(trainings * self.steps * self.batch_per_domain * USUAL_SOURCES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select == "leave-one-out" and self.task != "mdg":
            raise ValueError(f"select leave-one-out is for task mdg, not {self.task}; use source-validation")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup must be below steps = {self.steps}, not {self.warmup}")
        if self.batch_per_domain % self.devices:
            nearest = self.devices * max(1, round(self.batch_per_domain / self.devices))
            raise ValueError(
                f"batch_per_domain {self.batch_per_domain} must be divisible by devices = {self.devices}; try {nearest}"
            )


PRESETS: dict[str, dict[str, Any]] = {
    # The common protocol of DomainBed, SWAD, MIRO, GMDG and L-Reg: hours on a GPU, days on a CPU.
    "paper": {"normalization": "imagenet"},
    # A fold in minutes on two cores.
    "small": {
        "image_size": 112, "steps": 151, "batch_per_domain": 12, "eval_every": 25, "val_images": 100,
        "precision": "auto", "lr": 3e-3,  # docs/study/decisions.md
    },
    # `fit --quick`: only the LayerNorms of the upper half of the blocks are tuned, on stored tokens of the others.
    "quick": {
        "image_size": 112, "steps": 60, "batch_per_domain": 8, "eval_every": 30, "val_images": 100, "augment": False,
        "tune": "upper-layernorm", "lr": 3e-3, "lr_backbone": 1e-2, "lr_module": 1e-3, "lr_schedule": "cosine",
        "precision": "auto",
    },
}  # fmt: skip


def mask_lr(method: str) -> dict[str, float]:
    """What the preset `small` sets for methods with a mask; here, so that help need not import torch."""
    rate = 3e-4 if method.startswith("patchgen-attend") else 1e-3
    return {"lr_module": rate} if method.startswith(("patchgen", "ablation-")) else {}


def config_class(task: Any) -> type[Settings]:
    """The settings class of a task; `ccd` is a package of its own, imported only for its runs."""
    return Config if task != "ccd" else import_module("patchgen.ccd.settings").StreamConfig  # type: ignore[no-any-return]


def load_settings(path: str | Path, **changes: Any) -> Settings:
    """Read a YAML file of settings of any task; raises ValueError for unknown keys, with the nearest known one."""
    settings = {**read_settings(path), **changes}
    kind = config_class(settings.get("task"))
    known = known_settings(kind, settings, str(path))
    try:
        return kind(**known)
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
    missing = [f.name for f in fields if f.name not in settings and default_of(f) is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{where}: the settings {', '.join(missing)} are required")
    return settings


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default; MISSING if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


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

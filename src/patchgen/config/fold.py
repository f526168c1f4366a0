"""Settings of a fold: one domain is left out of training and scored at the end (tasks `mdg` and `mdg_gcd`)."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from patchgen.config.base import AT_LEAST_1, LARGEST, RATE, Settings

Pool = Literal["cls", "mean", "cls-mean", "patchgen", "patchgen-cls", "select"]
Selection = Literal["source-validation", "leave-one-out", "last", "oracle"]
SplitRule = Literal["domainbed", "group"]
Task = Literal["mdg", "mdg_gcd"]
USUAL_SOURCES = 3  # source domains of a typical benchmark
NO_DOMAIN = "none"  # value of `unseen`: nothing is left out


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

    lr: float = 5e-5
    """Learning rate of the head, and the default of the other learning rates."""
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

    not_hashed: ClassVar[tuple[str, ...]] = (
        *Settings.not_hashed, "devices", "deterministic", "checkpoint_activations"
    )  # fmt: skip
    bounds: ClassVar = {
        **Settings.bounds,
        **dict.fromkeys(("steps", "batch_per_domain", "eval_every", "accumulate", "num_classes"), AT_LEAST_1),
        **dict.fromkeys(("patience", "lora_rank", "swad_ratio"), AT_LEAST_1),
        "devices": (1, 1024), "warmup": (0, math.inf), "lr_backbone": RATE, "hparams": (-LARGEST, LARGEST),
    }  # fmt: skip

    selection_rule: ClassVar = "select"

    def likeness(self) -> tuple[Any, ...]:
        size = self.steps, self.batch_per_domain, self.image_size
        return (self.task, *size, self.backbone, self.eval_every, self.select == "leave-one-out")

    def images_seen(self) -> float:
        trainings = USUAL_SOURCES if self.select == "leave-one-out" else 1  # each of the others has a source less
        return float(trainings * self.steps * self.batch_per_domain * USUAL_SOURCES)

    def check(self) -> None:
        super().check()
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout is a share between 0 and 1, not {self.holdout}")
        if not 0 < self.labelled_share <= 1:
            raise ValueError(f"labelled_share is a share above 0 and at most 1, not {self.labelled_share}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a share from 0 to below 1, not {self.dropout}")
        if self.clip_gradients is not None and not 0 < self.clip_gradients < float("inf"):
            raise ValueError(f"clip_gradients is a norm above 0, such as 1.0, not {self.clip_gradients}")
        if self.select == "leave-one-out" and self.task != "mdg":
            raise ValueError(f"select leave-one-out is for task mdg, not {self.task}; use source-validation")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup must be below steps = {self.steps}, not {self.warmup}")
        if self.batch_per_domain % self.devices:
            raise ValueError(
                f"batch_per_domain {self.batch_per_domain} must be divisible by devices = {self.devices}; "
                f"try {self.devices * max(1, round(self.batch_per_domain / self.devices))}"
            )

    def images_at_once(self, batch: int) -> int | None:
        if self.micro_batch is None and self.accumulate > 1:
            return -(-batch // self.accumulate)
        return super().images_at_once(batch)


PRESETS: dict[str, dict[str, Any]] = {
    # The common protocol of DomainBed, SWAD, MIRO, GMDG and L-Reg: hours on a GPU, days on a CPU.
    "paper": {"normalization": "imagenet"},
    # A fold in minutes on two cores.
    "small": {
        "image_size": 112,
        "steps": 151,
        "batch_per_domain": 12,
        "eval_every": 25,
        "val_images": 100,
    },
    # `fit --quick`: only the LayerNorms of the last third of the blocks are tuned, on stored tokens of the others.
    "quick": {
        "image_size": 112,
        "steps": 60,
        "batch_per_domain": 8,
        "eval_every": 30,
        "val_images": 100,
        "tune": "upper-layernorm",
        "augment": False,
        "lr": 3e-3,
        "lr_backbone": 1e-2,
        "lr_module": 1e-3,
        "lr_schedule": "cosine",
        "precision": "auto",
    },
}

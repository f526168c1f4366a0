"""Every setting of a stream run (task `ccd`): as `config.Config`, one dataclass <-> one YAML file <-> the flags.

The defaults are the published ones of the host (PromptCCD); `small` is meant for two CPU cores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patchgen import plugins
from patchgen.config import LARGEST, Refine, Tune, check_kinds, check_least, from_file, run_hash

Components = Literal["known", "half", "grow"]
StreamSelection = Literal["session-validation", "last"]


@dataclass(frozen=True)
class StreamConfig:
    data: str
    """Folder `class/*.jpg`, `domain/class/*.jpg` or CSV manifest; or the official CIFAR-100 or CUB-200-2011 folder."""
    task: Literal["ccd"] = "ccd"
    """`ccd`: a labelled stage, then unlabelled stages in which new classes appear."""
    schedule: str = "paper"
    """Which classes enter when: `paper` (70 % labelled, then three times 10 %), or a YAML file."""
    holdout: float = 0.1
    """Share of each class that is never trained on, where the data has no test part of its own."""
    method: str = "promptccd+patchgen"
    """gcd, simgcd, promptccd, or gcd or promptccd with +patchgen or +patchgen-select."""
    pool: Literal["cls", "mean"] | None = None
    """What a method without the module reads: CLS when left out, or the mean of the patch tokens."""
    tune: Tune = "last_block"
    """What of the backbone is trained; the same for a host and for the host with PatchGen."""
    backbone: str = "auto"
    """Alias, hub id, local folder, .safetensors file, or `auto`."""
    image_size: int = 224
    """Pixels of the square crops; images are resized to 8/7 of it before."""
    normalization: Literal["backbone", "imagenet"] = "backbone"
    """Pixel mean and deviation: the backbone's own, or ImageNet's for all as in the lineage."""

    epochs: int = 200
    """Passes over the images of each stage."""
    batch: int = 128
    """Images a step, each in two views."""
    lr: float = 0.1
    """SGD's learning rate of backbone and projection head; it falls by a cosine to a thousandth."""
    lr_module: float | None = None
    """Learning rate of the PatchGen module; that of the rest when left out."""
    momentum: float = 0.9
    """SGD's momentum."""
    weight_decay: float = 5e-5
    """SGD's weight decay."""
    temperature: float = 1.0
    """Temperature of the contrast between views (InfoNCE)."""
    supervised_temperature: float = 0.07
    """Temperature of the contrast between classes (SupCon)."""
    supervised_weight: float = 0.35
    """Share of the supervised terms in the labelled stage; later stages have no labels."""
    entropy_weight: float = 2.0
    """simgcd: weight of the entropy of the mean prediction (published: 4 on CIFAR-100, 2 on CUB)."""
    projection_hidden: int = 2048
    """Width of the projection head's two hidden layers."""
    projection_bottleneck: int = 256
    """Width in front of its last layer."""
    projection_out: int = 65536
    """Width of its output, in which views are compared."""

    prompts: int = 5
    """Prompts an image gets: the means of its likeliest components."""
    warm_up: int = 30
    """Epochs of each stage without prompts and pseudo-labels."""
    refit_every: int = 30
    """Epochs between two fits of the mixture, from the end of the warm-up on."""
    components: Components = "known"
    """Mixture components: the number of classes so far (`known`), from stage 1 on `half` of it, or `grow`."""
    em_tolerance: float = 1e-7
    """The fit of the mixture ends when a step gains less log-likelihood than this."""
    replay: int = 100
    """Features drawn from each component of the last stage's mixture and added to the next fits."""
    test_prompts: bool = False
    """Use prompts for the scored features too (the host does not)."""

    pseudo_labels: Literal["mixture", "none"] = "mixture"
    """PatchGen: labels of unlabelled images: their likeliest component, or none (then only L_ms is left)."""
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

    selection: StreamSelection = "session-validation"
    """Which epoch of a stage is kept: the best on held-out images of the classes so far, or the last."""
    val_every: int = 10
    """Epochs between two validations; the last epoch is always validated."""
    val_images: int | None = None
    """At most so many validation images, and as many of the stage beside them; all when left out."""
    inits: int = 10
    """Starts of the k-means that scores a stage; the best one counts."""
    seed: int = 1
    """Seed of batches, augmentation, initial weights and k-means; the stages are drawn by the schedule's own."""

    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    threads: int | None = None
    """CPU threads; results change with it in the last digits, so it is recorded."""
    cache: bool = True
    """Keep decoded pixels on disk ($PATCHGEN_CACHE)."""

    def __post_init__(self) -> None:
        _check(self)

    def hash(self, data_fingerprint: str) -> str:
        """Name of the run: a digest of the settings that decide its numbers, and of the rows of its stages."""
        usual = StreamConfig("")
        settings = {k: v for k, v in self.deciding().items() if k == "task" or v != getattr(usual, k)}
        return run_hash(settings, data_fingerprint, plugins.used_by(self))

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the numbers; a schedule does so by its stages, which the fingerprint has."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in NOT_HASHED}


NOT_HASHED = ("data", "schedule", "holdout", "accelerator", "threads", "cache")
LEAST = dict.fromkeys(
    ("image_size", "epochs", "projection_hidden", "projection_bottleneck", "projection_out", "prompts", "refit_every",
     "val_every", "val_images", "inits", "threads"), 1,
)  # fmt: skip
LEAST |= {"batch": 2, "warm_up": 0, "replay": 0, "seed": 0}  # a contrast needs a second image
NOT_NEGATIVE = ("lr", "lr_module", "weight_decay", "entropy_weight", "lambda_ms", "lambda_sim", "lambda_conf")
POSITIVE = ("temperature", "supervised_temperature", "em_tolerance")

SMALL: dict[str, Any] = {
    "image_size": 84,
    "epochs": 6,
    "batch": 32,
    "lr": 0.02,  # at 0.1 so few steps saturate the mask: docs/ccd.md
    "projection_hidden": 512,
    "projection_bottleneck": 128,
    "projection_out": 4096,
    "warm_up": 2,
    "refit_every": 2,
    "val_every": 2,
    "val_images": 600,
}


def stream_preset(preset: str, data: str) -> dict[str, Any]:
    """What a preset sets for this data: the host halves its components and its learning rate on CUB."""
    from patchgen.data.cub import is_cub

    settings = dict(SMALL) if preset == "small" else {"normalization": "imagenet"}
    if data and Path(data).is_dir() and is_cub(Path(data)):
        settings |= {"components": "half"} | ({"lr": 0.05} if preset == "paper" else {})
    return settings


def load_stream_config(path: str | Path, **changes: Any) -> StreamConfig:
    """Read a YAML file of settings; unknown keys are refused with the nearest known one."""
    return from_file(StreamConfig, path, changes)


def _check(config: StreamConfig) -> None:
    """Refuse settings that contradict each other before any work is done."""
    check_kinds(config)
    check_least(config, LEAST)
    for name in (*NOT_NEGATIVE, *POSITIVE):
        value = getattr(config, name)
        if value is not None and not (0 <= value <= LARGEST and (value or name in NOT_NEGATIVE)):
            least = "above 0" if name in POSITIVE else "from 0 on"
            raise ValueError(f"{name} must be a number {least}, at most {LARGEST:g}, not {value}")
    for name in ("holdout", "momentum"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} is a share from 0 to below 1, not {getattr(config, name)}")
    if not 0 <= config.supervised_weight <= 1:
        raise ValueError(f"supervised_weight is a share from 0 to 1, not {config.supervised_weight}")
    if not 0 < config.tau < 1:
        raise ValueError(f"tau is a mask value between 0 and 1, not {config.tau}")
    if config.warm_up >= config.epochs:
        raise ValueError(
            f"warm_up must be below the number of epochs, {config.epochs}, or prompts never begin; not {config.warm_up}"
        )

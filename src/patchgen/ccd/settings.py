"""Settings of a stream: a labelled stage, then stages in which new classes appear (task `ccd`).

The defaults are those published for the host method (PromptCCD); `small` is meant for two CPU cores.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from patchgen.config import COUNT, RATE, Settings

USUAL_IMAGES = 5_000  # assumed images per stage, before any stage has run
Components = Literal["known", "half", "grow"]
StreamSelection = Literal["session-validation", "last"]


@dataclass(frozen=True)
class StreamConfig(Settings):
    """A run over a stream of stages (task `ccd`)."""

    data: str
    """Folder `class/*.jpg`, `domain/class/*.jpg` or CSV manifest; or the official CIFAR-100 or CUB-200-2011 folder."""
    _: KW_ONLY
    task: Literal["ccd"] = "ccd"
    """`ccd`: a labelled stage, then unlabelled stages in which new classes appear."""
    schedule: str = "paper"
    """Which classes appear at which stage: `paper` (70 % labelled, then three times 10 %), or a YAML file."""
    holdout: float = 0.1
    """Share of each class that is never trained on, if the data has no test part."""
    method: str = "promptccd+patchgen"
    """gcd, simgcd, promptccd, or gcd or promptccd with +patchgen or +patchgen-select."""
    pool: Literal["cls", "mean"] | None = None
    """What a method without the module reads: CLS by default, or the mean of the patch tokens."""
    tune: Literal["head", "layernorm", "last_block", "full"] = "last_block"
    """Which part of the backbone is trained; the same for a host method with and without PatchGen."""
    image_size: int = 224
    """Side of the square crops in pixels; images are first resized to 8/7 of it."""
    keep_aspect: bool = False
    """Resize the shorter side (bicubic), as PromptCCD does; otherwise images are squashed to a square (bilinear)."""

    epochs: int = 200
    """Epochs per stage."""
    batch: int = 128
    """Images per step, each in two views."""
    lr: float = 0.1
    """Learning rate (SGD) of backbone and projection head, with a cosine schedule to a thousandth."""
    momentum: float = 0.9
    """SGD's momentum."""
    weight_decay: float = 5e-5
    """SGD's weight decay."""
    temperature: float = 1.0
    """Temperature of the contrast between views (InfoNCE)."""
    supervised_temperature: float = 0.07
    """Temperature of the contrast between classes (SupCon)."""
    supervised_weight: float = 0.35
    """Weight of the supervised terms in the labelled stage; later stages have no labels."""
    entropy_weight: float = 2.0
    """simgcd: weight of the entropy of the mean prediction (published: 4 on CIFAR-100, 2 on CUB)."""
    projection_hidden: int = 2048
    """Width of the projection head's two hidden layers."""
    projection_bottleneck: int = 256
    """Width before the last layer of the projection head."""
    projection_out: int = 65536
    """Output width of the projection head, in which views are compared."""

    prompts: int = 5
    """Prompts per image: the means of its most probable components."""
    warm_up: int = 30
    """Epochs at the start of each stage without prompts and pseudo-labels."""
    refit_every: int = 30
    """Epochs between two fits of the mixture, after the warm-up."""
    components: Components = "known"
    """Mixture components: the number of classes so far (`known`), from stage 1 on `half` of it, or `grow`."""
    em_tolerance: float = 1e-7
    """The mixture fit stops when a step improves the log-likelihood by less than this."""
    replay: int = 100
    """Features drawn from each component of the last stage's mixture and added to the next fits."""
    test_prompts: bool = False
    """Also use prompts for the scored features (PromptCCD does not)."""

    pseudo_labels: Literal["mixture", "none"] = "mixture"
    """PatchGen: labels of unlabelled images: their likeliest component, or none (then only L_ms applies)."""

    selection: StreamSelection = "session-validation"
    """Which epoch of a stage is selected: the best on held-out images of the classes so far, or the last."""
    val_every: int = 10
    """Epochs between two validations; the last epoch is always validated."""
    val_images: int | None = None
    """Maximum validation images, and as many images of the stage; all by default."""
    inits: int = 10
    """Number of initialisations of the k-means that scores a stage; the best one is used."""
    seed: int = 1
    """Seed of batches, augmentation, initial weights and k-means; the stages use the schedule's seed."""

    not_hashed: ClassVar[tuple[str, ...]] = (*Settings.not_hashed, "schedule", "holdout")
    always_hashed: ClassVar[tuple[str, ...]] = ("task",)
    bounds: ClassVar = {
        **Settings.bounds,
        **dict.fromkeys(("epochs", "projection_hidden", "projection_bottleneck", "projection_out", "prompts",
                         "refit_every", "val_every", "inits"), COUNT),
        **dict.fromkeys(("temperature", "supervised_temperature", "em_tolerance"), "(0, 1e9]"),
        "batch": "[2, inf]",  # a contrast needs a second image
        "holdout": "[0, 1)", "momentum": "[0, 1)", "supervised_weight": "[0, 1]", "entropy_weight": RATE,
        "warm_up": "[0, inf]", "replay": "[0, inf]",
    }  # fmt: skip
    selection_rule: ClassVar = "selection"

    def cost_key(self) -> tuple[Any, ...]:
        return (self.task, Path(self.data).name, self.epochs, self.batch, self.image_size, self.backbone)

    def images_seen(self) -> float:
        return 2.0 * USUAL_IMAGES * self.epochs  # two views

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm_up >= self.epochs:
            raise ValueError(f"warm_up must be below epochs = {self.epochs} or prompts never start, not {self.warm_up}")


SMALL: dict[str, Any] = {
    "image_size": 84, "epochs": 6, "batch": 32, "projection_hidden": 512, "projection_bottleneck": 128,
    "projection_out": 4096, "warm_up": 2, "refit_every": 2, "val_every": 2, "val_images": 600,
    "lr": 0.02,  # at 0.1 so few steps saturate the mask: docs/results/ccd-small.md
}  # fmt: skip
PAPER: dict[str, Any] = {"normalization": "imagenet", "keep_aspect": True, "inits": 100}  # in addition to the defaults


def stream_preset(preset: str, data: str) -> dict[str, Any]:
    """The settings of a preset for this data: the host method halves components and learning rate on CUB."""
    from patchgen.data.cub import is_cub

    if preset not in ("small", "paper"):
        raise ValueError(f"preset must be small or paper for --task ccd, not {preset}")
    settings = dict(SMALL if preset == "small" else PAPER)
    if data and Path(data).is_dir() and is_cub(Path(data)):
        settings |= {"components": "half"} | ({"lr": 0.05} if preset == "paper" else {})
    return settings

"""Use a trained model on images: classes with probabilities and, if the method has one, the mask.

predictor = load_predictor("tiles-model")                 # a model folder of `patchgen fit`, or a run folder
predictions = list(predictor.predict(paths))              # Prediction, or Unreadable for a broken file
predictor.explain("tile.png").overlay().save("map.png")   # [image | mask over it] and a colour bar
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchgen.common.files import cache_dir
from patchgen.common.machine import computes_half
from patchgen.common.reading import BATCH, batches
from patchgen.config import Config
from patchgen.data.images import ImageStore, UnreadableImage, decode
from patchgen.data.inputs import squares
from patchgen.data.stain import Macenko, read_macenko
from patchgen.data.table import TileScale, tile_scale
from patchgen.draw.overlay import Explanation
from patchgen.methods import make_method
from patchgen.methods.build import build_model, check_origin, describe, load_trained
from patchgen.model.classifier import Classifier
from patchgen.model.device import find_device
from patchgen.model.weights import without_requests
from patchgen.runs.folder import RunFolder, is_model_folder
from patchgen.runs.tensors import load_tensors

if TYPE_CHECKING:
    from patchgen.predict.runtime import Runtime, RuntimeName

T = TypeVar("T")
Checkpoint = Literal["selected", "swad"]
NOT_FINITE = "the model's output for it is not finite: a setting or weight of the model is damaged; get the model again"
Map = Literal["auto", "mask", "grad-cam", "rollout"]
MAP_NAMES = {"grad-cam": "Grad-CAM", "rollout": "attention rollout"}
TOP = 5  # classes listed in an explanation


@dataclass(frozen=True, eq=False)
class Prediction:
    path: Path  # empty if the image was passed as pixels
    label: str
    confidence: float  # the label's probability
    probabilities: np.ndarray  # (C,) float32, in the order of `Predictor.classes`
    mask: np.ndarray | None  # (h, w) float32 in [0, 1]; None if the method has no mask
    unlike_training: bool | None  # farther from all training features than source validation; None: not known
    features: np.ndarray  # (D,), the input of the head


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be decoded, or whose prediction is not finite."""

    path: Path
    reason: str


class Outputs(NamedTuple):
    probabilities: np.ndarray  # (B, C), calibrated
    mask: np.ndarray | None  # (B, h, w)
    features: np.ndarray  # (B, D)

    def differences(self, outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The largest difference of each of these outputs, by name."""
        return {name: float(np.abs(getattr(self, name) - values).max()) for name, values in outputs.items()}


@dataclass(frozen=True, eq=False)
class Familiar:
    """The distribution of training features: class centres and one shared covariance; contains no images."""

    centres: Tensor  # (K, D) float32, the classes that training has seen, whitened
    whitening: Tensor  # (D, D) float32: features @ whitening have unit covariance within a class
    threshold: float  # a quantile of the distances of source validation

    def distance(self, features: Tensor) -> Tensor:
        """Mahalanobis distance (B,) of features (B, D) to the nearest class centre."""
        whitened = features.float().cpu() @ self.whitening
        return torch.cdist(whitened, self.centres, compute_mode="donot_use_mm_for_euclid_dist").amin(1)

    def unlike(self, features: Tensor) -> list[bool]:
        """True for features (B, D) whose distance exceeds the threshold."""
        return (self.distance(features) > self.threshold).tolist()


@dataclass(frozen=True, eq=False)
class Confidence:
    """Calibration on source images (`patchgen.fit.calibrate`); that of a run folder is the plain softmax."""

    temperature: float = 1.0
    familiar: Familiar | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (B, C) -> softmax(logits / temperature)."""
        return (logits.float() / self.temperature).softmax(1)


def finite_rows(*values: np.ndarray | None) -> np.ndarray:
    """(B,) bool: whether all numbers of a row are finite, in each of the arrays (B, ...)."""
    return np.all([np.isfinite(v).reshape(len(v), -1).all(1) for v in values if v is not None], axis=0)


def load_predictor(path: str | Path, checkpoint: Checkpoint = "selected", **how: Any) -> "Predictor":
    """The classifier of a model folder, or of one of a run folder's checkpoints; ValueError for anything else.

    Args:
        how: `accelerator` and `precision` of the `Predictor`; `backbone`, where the backbone's weights are if they are
            not in the folder and not where it says; `allow_download`: the folder may choose what is downloaded.
    """
    from patchgen.predict.model_folder import read_model

    if is_model_folder(path):
        return read_model(path, **how).predictor
    if not (Path(path) / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run folder (it has no config.yaml) and not a model folder: check the path")
    return load_run(path, checkpoint, **how)


def identity(path: str | Path, checkpoint: Checkpoint = "selected") -> str:
    """A digest of everything that predictions depend on: settings, calibration and weights of the folder."""
    folder = Path(path)
    files = [folder / "config.json"]  # of a model folder: it holds the digest of its weights
    if (folder / "config.yaml").is_file():
        files = [folder / "config.yaml", RunFolder(folder).checkpoint(checkpoint)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def without_requests_of(folder: Path, backbone: str | None, allow_download: bool) -> AbstractContextManager[None]:
    """Bars requests while the settings of a folder choose the backbone, unless the user allowed it or named one."""
    advice = f"{folder} may not choose what is downloaded: add --allow-download, or name a local copy by --backbone"
    return nullcontext() if allow_download or backbone else without_requests(advice)


def load_run(
    run: str | Path, checkpoint: Checkpoint = "selected", *, backbone: str | None = None, allow_download: bool = False,
    **device: Any,
) -> "Predictor":  # fmt: skip
    """The classifier of a run folder; ValueError for weights that are damaged or do not belong to its settings."""
    folder = RunFolder.open(run)
    config = folder.config  # first: a stream's run has other settings, and says so
    config, file = replace(config, backbone=backbone or config.backbone), folder.checkpoint(checkpoint)
    if not file.is_file():
        needs = "a finished run trained with --swad" if checkpoint == "swad" else "a run with at least one evaluation"
        raise ValueError(f"{folder.path} has no checkpoint {checkpoint!r}, which needs {needs}")
    tensors, facts = load_tensors(file)
    names = facts.get("classes")
    if not isinstance(names, list) or not names or len({n for n in names if isinstance(n, str)}) < len(names):
        raise ValueError(f"{file}: the header must name each class once, found {names!r}; train the run again")
    classes = tuple(names)
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"{file}: {broken[0]} holds values that are not finite; train the run again")
    folder.require_plugins()
    method = make_method(config)
    method.class_names, method.saved = classes, tensors
    with without_requests_of(folder.path, backbone, allow_download):
        model = build_model(config, method, len(classes), recorded=facts.get("backbone") or {})
    check_origin(file, facts, describe(model, classes))
    load_trained(model, tensors)
    stain = read_macenko(facts.get("stain"), str(file)) if config.stain != "none" else None
    return Predictor(model, classes, config, stain=stain, tiles=read_tile_scale(facts), **device)


def read_tile_scale(facts: Mapping[str, Any]) -> TileScale | None:
    """The scale of the training tiles, as a checkpoint or model folder records it."""
    recorded = facts.get("tiles")
    return tile_scale(recorded.get("mpp"), recorded.get("side")) if isinstance(recorded, dict) else None


class Predictor:
    """A trained classifier with its classes; `load_predictor` makes one.

    Args:
        accelerator: `auto`, `cpu`, `cuda`, `mps`; None: the CPU for a run that was trained on it, else `auto`.
        precision: `32-true`, `bf16-mixed`, or `auto`: the latter on devices that compute it natively.
    """

    def __init__(
        self, model: Classifier, classes: tuple[str, ...], config: Config, confidence: Confidence | None = None,
        stain: Macenko | None = None, tiles: TileScale | None = None, *, accelerator: str | None = None,
        precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true",
    ) -> None:  # fmt: skip
        self.device = find_device(accelerator or ("cpu" if config.accelerator == "cpu" else "auto"))
        self.half = computes_half(self.device.type, precision)
        self.model = model.to(self.device).eval()
        self.classes, self.config = classes, config
        self.confidence = confidence or Confidence()
        self.stain = stain  # stain normalisation as in training, also for files, slides and uploads
        self.tiles = tiles  # scale of the training images, if they were tiles of slides
        self.runtime: Runtime | None = None  # replaces torch

    @property
    def interpolation(self) -> str:
        """How an image is resized to the square that the model reads."""
        return self.model.backbone.interpolation

    def use(self, runtime: "RuntimeName", say: Callable[[str], None] | None = None, images: int | None = None) -> Self:
        """Use another runtime for predictions; gradients and rankings still use torch.

        Args:
            runtime: `torch`, `onnx`, `openvino`, or `auto`: the fastest that is installed and agrees with torch.
            say: Called with a line that names the runtime and its difference from torch.
            images: Number of images to predict; for a few, `auto` does not convert a model.
        """
        from patchgen.predict.runtime import open_runtime

        self.runtime = open_runtime(self, runtime, say or (lambda _: None), images)
        return self

    @property
    def variant(self) -> str:
        """How predictions are computed, if not by plain torch; results of different variants are not mixed."""
        return self.runtime.name if self.runtime else "bf16-mixed" * self.half

    def predict(
        self, paths: Iterable[str | Path], batch: int = BATCH, tick: Callable[[int], None] | None = None
    ) -> Iterator[Prediction | Unreadable]:
        """In the order of `paths`, which may be endless; `tick` is called with the number of images of each batch."""
        return self.each(paths, self.answer, batch, tick)

    def each(
        self, paths: Iterable[str | Path], answer: Callable[[list[np.ndarray], list[Path]], Iterable[T]],
        batch: int = BATCH, tick: Callable[[int], None] | None = None,
    ) -> Iterator[T | Unreadable]:  # fmt: skip
        """As `predict`, with what `answer` makes of the readable images (S, S, 3) of a batch and their paths."""
        if isinstance(paths, (str, Path)):
            raise ValueError(f"paths must be a list of files, not the single path {str(paths)!r}; put it in [...]")
        for part, images in batches(map(Path, paths), self.decode, batch, tick, each=True):
            readable = [i for i, image in enumerate(images) if isinstance(image, np.ndarray)]
            answers = iter(answer([images[i] for i in readable], [part[i] for i in readable]) if readable else ())
            for image in images:
                yield image if isinstance(image, Unreadable) else next(answers)

    def decode(self, path: Path) -> np.ndarray | Unreadable:
        """(S, S, 3) uint8, or why not."""
        try:
            return decode(path, self.config.image_size, self.interpolation)
        except UnreadableImage as error:
            return Unreadable(path, error.reason)

    def store(self, files: Sequence[Path]) -> ImageStore:
        """Images by row, prepared as in training: size, interpolation and stains; cached if the settings say so."""
        cache = cache_dir() if self.config.cache else None
        store = ImageStore(files, self.config.image_size, cache, interpolation=self.interpolation)
        store.stain = self.stain
        return store

    def stained(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Images (S, S, 3) uint8 -> (B, S, S, 3) uint8, stains normalised as in training."""
        return np.stack(images if self.stain is None else [self.stain(image) for image in images])

    def pixels(self, images: Sequence[np.ndarray]) -> Tensor:
        """Images (S, S, 3) uint8 -> (B, 3, S, S) in [0, 1] on the model's device, stains normalised as in training."""
        return torch.from_numpy(self.stained(images)).to(self.device).permute(0, 3, 1, 2).float() / 255

    def inputs(self, images: Sequence[np.ndarray]) -> Tensor:
        """Images (S, S, 3) uint8, S the model's image size -> what the model reads: (B, 3, S, S), on its device."""
        return self.model.backbone.normalised(self.pixels(images))

    def autocast(self) -> torch.autocast:
        """The context of the predictor's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    @torch.inference_mode()
    def outputs(self, images: Sequence[np.ndarray]) -> Outputs:
        """Images (S, S, 3) uint8 in one forward pass of torch."""
        with self.autocast():
            out = self.model(self.inputs(images))
        masks = None if out.mask is None else out.mask.float().unflatten(1, self.model.grid).cpu().numpy()
        return Outputs(
            self.confidence.probabilities(out.logits).cpu().numpy(), masks, out.features.float().cpu().numpy()
        )

    @torch.inference_mode()
    def read(
        self, store: ImageStore, rows: np.ndarray, tick: Callable[[int], None] | None = None,
        tokens: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Logits (N, C), features (N, D) and masks (N, P) of rows of a store, or of their stored tokens, in float64."""
        backbone, outputs = self.model.backbone, []

        def inputs(part: np.ndarray) -> Tensor:
            if tokens is not None:
                return torch.from_numpy(tokens[part]).to(self.device).float()
            return backbone.normalised(store.load(part).to(self.device))

        for _, part in batches(rows, inputs, tick=tick):
            outputs.append([None if each is None else each.double().cpu() for each in self.model(part)[:3]])
        logits, features, masks = zip(*outputs, strict=True)
        return torch.cat(logits), torch.cat(features), torch.cat(masks) if self.model.has_mask else None

    def computed(self, images: Sequence[np.ndarray]) -> Outputs:
        """The same of the runtime."""
        return self.runtime.answer(images) if self.runtime else self.outputs(images)

    def answer(
        self, images: Sequence[np.ndarray], paths: Sequence[Path] | None = None
    ) -> list[Prediction | Unreadable]:
        """Images (S, S, 3) uint8, S the model's image size; `Unreadable` where the output is not finite."""
        out, familiar = self.computed(images), self.confidence.familiar
        nothing = [None] * len(images)
        masks = nothing if out.mask is None else out.mask
        unlike = familiar.unlike(torch.from_numpy(out.features)) if familiar else nothing
        best = out.probabilities.argmax(1)
        rows = zip(paths or [Path()] * len(images), best, out.probabilities, masks, unlike, out.features, strict=True)
        return [
            Prediction(path, self.classes[c], float(p[c]), p, mask, flag, features) if good
            else Unreadable(path, NOT_FINITE)
            for (path, c, p, mask, flag, features), good in zip(rows, finite_rows(*out), strict=True)
        ]  # fmt: skip

    def score(self, images: Sequence[np.ndarray]) -> list[Prediction]:
        """The same of images that must all have finite outputs; otherwise ValueError."""
        answers = self.answer(images)
        predictions = [answer for answer in answers if isinstance(answer, Prediction)]
        if len(predictions) < len(answers):
            raise ValueError(NOT_FINITE)
        return predictions

    def explain(self, image: str | Path | Image.Image | np.ndarray, how: Map = "auto") -> Explanation:
        """Where the classifier looks in an image (file, open image or (H, W, 3) uint8), with the likeliest classes.

        Args:
            how: The model's `mask`; `grad-cam` or `rollout` (of attention), computed afterwards for the predicted
                class; `auto`: the mask, or Grad-CAM if the method has none.
        """
        from patchgen.predict.attribution import check_rankings, relative_map

        if how == "auto":
            how = "mask" if self.model.has_mask else "grad-cam"
        check_rankings(self.model, (how,), "this model")
        path = Path(image) if isinstance(image, (str, os.PathLike)) else None
        [pixels] = squares([image], self.config.image_size, self.interpolation)
        [answer] = self.answer([pixels])
        if isinstance(answer, Unreadable):
            raise UnreadableImage(path or "passed as pixels", NOT_FINITE, fix="")
        order = np.argsort(-answer.probabilities, kind="stable")[:TOP]
        top = tuple((self.classes[i], float(answer.probabilities[i])) for i in order)
        if how == "mask" and answer.mask is not None:
            return Explanation(path, pixels, answer.mask, top)
        return Explanation(path, pixels, relative_map(self.model, self.inputs([pixels]), how), top, MAP_NAMES[how])

"""Use any run on images: classes with probabilities, and where the method has one, the mask as a picture.

    predictor = load_run("runs/4f2a9c01b7de")                 # or checkpoint="swad"
    for found in predictor.predict(paths):                    # Prediction, or Unreadable for a broken file
        print(found)
    predictor.explain("tile.png").overlay().save("why.png")   # [image | mask over it] and a colour bar

A mask value is absolute: 0 leaves a patch out, 1 takes it whole. The colour scale is therefore fixed to 0..1, and a
mask that selects everything looks like one; ``relative=True`` stretches it for viewing and says so in the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image, ImageOps

from patchgen.config import Config
from patchgen.data.augment import normalize
from patchgen.data.images import UnreadableImage, decode
from patchgen.methods import make_method
from patchgen.model.checkpoint import build_model, describe, load_trained
from patchgen.model.classifier import Classifier
from patchgen.train.records import RunFolder, load_tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Checkpoint = Literal["selected", "swad"]
DECODERS = 2  # threads that read the next batch while the model works on this one
TOP = 5  # classes an explanation lists
LONGEST = 1024  # pixels of the longer side of the original in a picture
COLOURS = "viridis"  # even steps to the eye, and readable without red or green
OPACITY = 0.6  # of the colours over the image
NOTICE = "selection map, not an annotation"


@dataclass(frozen=True, eq=False)
class Prediction:
    path: Path
    label: str
    confidence: float  # the label's probability
    probabilities: np.ndarray  # (C,) float32, in the order of `Predictor.classes`
    mask: np.ndarray | None  # (h, w) float32 in [0, 1]; None where the method has no mask


@dataclass(frozen=True)
class Unreadable:
    """What `Predictor.predict` yields in the place of an image that cannot be decoded."""

    path: Path
    reason: str

    @classmethod
    def because(cls, path: Path, error: UnreadableImage) -> Unreadable:
        cause = error.__cause__ or error  # the error's own text repeats the path
        return cls(path, f"{type(cause).__name__}: {cause}")


Pixels = np.ndarray | Unreadable  # (S, S, 3) uint8, or why not


class Scores(NamedTuple):
    """What the model says of one image."""

    probabilities: np.ndarray  # (C,)
    mask: np.ndarray | None  # (h, w)


def load_run(run: str | Path, checkpoint: Checkpoint = "selected") -> Predictor:
    """The classifier of a run folder, ready for images.

    Raises:
        ValueError: no run folder, no such checkpoint, or weights that are damaged or do not belong to the run's
            settings or backbone.
    """
    folder = RunFolder.open(run)
    file = _checkpoint_file(folder, checkpoint)
    tensors, facts = load_tensors(file)
    classes = _classes(facts, file)
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"{file}: {broken[0]} holds values that are not finite; train the run again")
    config = folder.config
    model = build_model(config, make_method(config), len(classes))
    _check_origin(file, facts, describe(model, classes))
    load_trained(model, tensors)
    return Predictor(model, classes, config)


def _checkpoint_file(folder: RunFolder, name: str) -> Path:
    names = [known for known in get_args(Checkpoint) if folder.checkpoint(known).is_file()]
    if name not in names:
        there = f"it has {' and '.join(names)}" if names else "it has none yet: train it to its first evaluation"
        hint = "; swad needs a finished run trained with --swad" if name == "swad" else ""
        raise ValueError(f"{folder.path} has no checkpoint {name!r} ({there}){hint}")
    return folder.checkpoint(name)


def _classes(facts: dict[str, Any], file: Path) -> tuple[str, ...]:
    names = facts.get("classes")
    if not isinstance(names, list) or not names or len({n for n in names if isinstance(n, str)}) < len(names):
        raise ValueError(f"{file}: the header must name each class once, found {names!r}; train the run again")
    return tuple(names)


def _check_origin(file: Path, facts: dict[str, Any], about: dict[str, Any]) -> None:
    """The trained tensors mean something only on the backbone, pool and grid they were trained with."""
    was, now = facts.get("backbone", {}), about["backbone"]
    if was.get("digest") != now["digest"]:
        raise ValueError(
            f"{file} was trained on another backbone, {was.get('resolved')} (digest {str(was.get('digest'))[:12]}), "
            f"than {now['resolved']} (digest {now['digest'][:12]}), which the run's settings load now; "
            "set `backbone` in config.yaml to the weights of then"
        )
    for name in ("pool", "grid"):
        if facts.get(name) != about[name]:
            raise ValueError(
                f"{file} was trained with {name} {facts.get(name)}, but config.yaml now gives {about[name]}; "
                "restore its settings (method, pool, image_size)"
            )


class Predictor:
    """A trained classifier with its classes; `load_run` makes one."""

    def __init__(self, model: Classifier, classes: tuple[str, ...], config: Config) -> None:
        from lightning_fabric import Fabric

        # A run may have been trained elsewhere: its device is kept only where it is sure to exist.
        accelerator = "cpu" if config.accelerator == "cpu" else "auto"
        self.device = Fabric(accelerator=accelerator, devices=1).device
        self.model = model.to(self.device).eval()
        self.classes, self.config = classes, config

    def predict(
        self, paths: Iterable[str | Path], batch: int = 64, tick: Callable[[int], None] | None = None
    ) -> Iterator[Prediction | Unreadable]:
        """Predictions in the order of `paths`, one batch and the next one's pixels in memory at a time.

        Args:
            paths: Image files; may be endless.
            batch: Images a forward pass.
            tick: Called with the number of images after each batch.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        if isinstance(paths, (str, Path)):
            raise ValueError(f"paths must be a list of files, not the single path {str(paths)!r}; put it in [...]")
        return self._stream((Path(path) for path in paths), batch, tick)

    def _stream(
        self, paths: Iterator[Path], batch: int, tick: Callable[[int], None] | None
    ) -> Iterator[Prediction | Unreadable]:
        with ThreadPoolExecutor(DECODERS) as pool:
            ahead = self._decode(pool, islice(paths, batch))
            while ahead:
                current, ahead = ahead, self._decode(pool, islice(paths, batch))
                yield from self._predict([(path, future.result()) for path, future in current])
                if tick:
                    tick(len(current))

    def _decode(self, pool: ThreadPoolExecutor, paths: Iterable[Path]) -> list[tuple[Path, Future[Pixels]]]:
        return [(path, pool.submit(_pixels, path, self.config.image_size)) for path in paths]

    def _predict(self, decoded: list[tuple[Path, Pixels]]) -> Iterator[Prediction | Unreadable]:
        scores = iter(self._score([pixels for _, pixels in decoded if isinstance(pixels, np.ndarray)]))
        for path, pixels in decoded:
            if isinstance(pixels, Unreadable):
                yield pixels
                continue
            probabilities, mask = next(scores)
            best = int(probabilities.argmax())
            yield Prediction(path, self.classes[best], float(probabilities[best]), probabilities, mask)

    @torch.inference_mode()
    def _score(self, images: list[np.ndarray]) -> list[Scores]:
        """Images (S, S, 3) uint8 in one forward pass."""
        if not images:
            return []
        pixels = torch.from_numpy(np.stack(images)).to(self.device).permute(0, 3, 1, 2).float() / 255  # (B, 3, S, S)
        backbone = self.model.backbone
        out = self.model(normalize(pixels, backbone.mean, backbone.std))
        probabilities = out.logits.float().softmax(1).cpu().numpy()
        if out.mask is None:
            return [Scores(row, None) for row in probabilities]
        masks = out.mask.float().unflatten(1, self.model.grid).cpu().numpy()  # (B, h, w)
        return [Scores(*pair) for pair in zip(probabilities, masks, strict=True)]

    def require_mask(self) -> None:
        """ValueError when the run's method has no mask to show."""
        if self.model.pool != "patchgen":
            raise ValueError(
                f"method {self.config.method!r} has no mask to explain with (its head reads {self.model.pool!r}); "
                "`predict` works with this run, and `patchgen train --method patchgen` trains one with a mask"
            )

    def explain(self, path: str | Path) -> Explanation:
        """The mask of one image beside its likeliest classes.

        Raises:
            ValueError: the run's method has no mask, or (`UnreadableImage`) the file is no image.
        """
        self.require_mask()
        pixels = decode(path, self.config.image_size)
        [(probabilities, mask)] = self._score([pixels])
        assert mask is not None  # require_mask has seen to it
        order = np.argsort(-probabilities, kind="stable")[:TOP]
        top = tuple((self.classes[i], float(probabilities[i])) for i in order)
        return Explanation(Path(path), pixels, mask, top)


def _pixels(path: Path, size: int) -> Pixels:
    try:
        return decode(path, size)
    except UnreadableImage as error:
        return Unreadable.because(path, error)


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why an image got its label, as far as the mask tells."""

    path: Path
    image: np.ndarray  # (S, S, 3) uint8: what the model saw
    mask: np.ndarray  # (h, w) float32 in [0, 1]
    top: tuple[tuple[str, float], ...]  # (class, probability), likeliest first

    @property
    def mask_statistics(self) -> dict[str, float]:
        return {"min": float(self.mask.min()), "mean": float(self.mask.mean()), "max": float(self.mask.max())}

    def overlay(self, threshold: float | None = None, *, relative: bool = False) -> Image.Image:
        """A picture: the original image, the mask over it, and the colour bar.

        Args:
            threshold: Also outline where the mask exceeds this value in (0, 1).
            relative: Stretch the colours to the mask's own range; the picture then says so.
        """
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"threshold is a mask value between 0 and 1, not {threshold}")
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = _draw(self, threshold, relative)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def original(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 of a readable image: upright, its aspect kept, the longer side at most LONGEST."""
    with Image.open(path) as image:
        image.draft(None, (LONGEST, LONGEST))
        width, height = ImageOps.exif_transpose(image).size
    scale = min(1.0, LONGEST / max(width, height))
    # `decode` knows transparency, 16 bits and what to refuse, but makes squares: the shorter side is restored here
    square = Image.fromarray(decode(path, round(max(width, height) * scale)))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.array(square.resize(size, Image.Resampling.BILINEAR))


def upsample(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """Smooth (h, w) -> (height, width); never outside the mask's own range, so nothing is selected by ringing."""
    grown = Image.fromarray(mask.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(grown), mask.min(), mask.max())


def _draw(found: Explanation, threshold: float | None, relative: bool) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    photo = original(found.path)
    height, width = photo.shape[:2]
    mask = upsample(found.mask, height, width)
    shape = min(max(height / width, 0.4), 2.5)  # a strip is shown smaller rather than as a picture without end
    layout = ConstrainedLayoutEngine(h_pad=0.09)  # inches: the title off the edge
    figure = Figure(figsize=(9.4, 4.1 * shape + 0.95), dpi=110, facecolor="white", layout=layout)
    left, right = figure.subplots(1, 2)
    left.imshow(photo)
    right.imshow(np.asarray(Image.fromarray(photo).convert("L")), cmap="gray", vmin=0, vmax=255)
    low, high, label = _scale(found.mask, relative)
    colours = right.imshow(mask, cmap=COLOURS, vmin=low, vmax=high, alpha=OPACITY)
    if threshold is not None and found.mask.min() < threshold < found.mask.max():
        for colour, line in (("black", 3.2), ("white", 1.4)):  # seen on bright and dark colours alike
            right.contour(mask, levels=[threshold], colors=colour, linewidths=line)
    _colour_bar(figure, right, colours, label)
    _caption(figure, left, right, found, threshold)
    return figure


def _scale(mask: np.ndarray, relative: bool) -> tuple[float, float, str]:
    """Where the colours begin and end, and what the picture says of it."""
    low, high = float(mask.min()), float(mask.max())
    if relative and high - low > 1e-4:
        return low, high, "mask, RELATIVE: stretched to this image's range"
    # a constant mask is never stretched: rounding errors would look like structure
    return 0.0, 1.0, "mask: 0 left out, 1 selected" + (" (constant: not stretched)" if relative else "")


def _colour_bar(figure: Figure, axes: Axes, colours: AxesImage, label: str) -> None:
    beside = axes.inset_axes((1.03, 0, 0.045, 1))  # as high as the panel, whatever its shape
    bar = figure.colorbar(colours, cax=beside)
    beside.set_facecolor("0.55")  # the bar's colours lie on gray as they do on the image
    ticks = np.linspace(*colours.get_clim(), 5)
    digits = 2 if ticks[-1] - ticks[0] > 0.05 else 4
    bar.set_ticks(ticks.tolist(), labels=[f"{tick:.{digits}f}" for tick in ticks])
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(label, fontsize=8.5)


def _caption(figure: Figure, left: Axes, right: Axes, found: Explanation, threshold: float | None) -> None:
    """Title, panel names and notice; names are shown as they are, never read as formulas."""
    label, confidence = found.top[0]
    figure.suptitle(f"{_short(label)}  {confidence:.1%}", fontsize=15, weight="bold", parse_math=False)
    m = found.mask_statistics
    crossed = threshold is not None and m["min"] < threshold < m["max"]
    outline = f", outline at {threshold:g}" if crossed else f", none crosses {threshold:g}" if threshold else ""
    left.set_title(_short(found.path.name), fontsize=9, color="0.35", parse_math=False)
    numbers = f"mask min {m['min']:.2f}, mean {m['mean']:.2f}, max {m['max']:.2f}{outline}"
    right.set_title(numbers, fontsize=9, color="0.35")
    right.set_xlabel(NOTICE, fontsize=8, color="0.35", style="italic")
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)


def _short(text: str, most: int = 44) -> str:
    """The end is kept: it is what tells long names apart."""
    printable = text.encode("utf-8", "backslashreplace").decode()
    return printable if len(printable) <= most else "…" + printable[1 - most :]

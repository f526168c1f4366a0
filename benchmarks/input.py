"""Images a second that reach the model: decoded once and augmented by the batch, against one Pillow image at a time.

    cost = measure(images=96, pixels=227)
    cost["ratio"]["cached"], cost["ratio"]["cold"]       # how many times as many images a second as the plain pipeline

The plain pipeline is what the host projects' loaders do for every sample and every epoch: open and decode the file,
RandomResizedCrop, flip, ColorJitter with hue in HSV, grayscale, tensor, normalise. Ours is the trainer's: `ImageStore`
and `prepare`, first on an empty cache (cold), then on a full one. All have one thread, so that a rate is that of one
core, and take turns batch by batch.
"""

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from benchmarks.common import Line, at_least_one, cpu_seconds, one_thread, report, write_images
from patchgen.data.augment import ATTEMPTS, OPERATIONS, Augment
from patchgen.data.images import ImageStore
from patchgen.data.loaders import prepare

TARGET = 5.0  # the smallest ratio wanted of the cached pipeline
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 32  # images of a domain in a step of the field's protocol
SMALL = {"images": 8, "pixels": 64, "size": 56, "repeats": 1}


def measure(*, images: int = 96, pixels: int = 227, size: int = 224, repeats: int = 3) -> dict[str, Any]:
    """Rates of the plain pipeline and of ours, cold and cached.

    Args:
        images: JPEG files that are generated for it.
        pixels: their side; PACS has 227, most photographs are larger, which makes decoding dearer.
        size: side of what the model reads.
        repeats: passes over all images, each with an empty cache of its own.
    """
    at_least_one(images=images, pixels=pixels, size=size, repeats=repeats)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        files = write_images(Path(folder), images, pixels)
        passes = [_pass(files, Path(folder) / f"cache{i}", size, i) for i in range(repeats)]
    rates = {name: images / statistics.median(seconds[name] for seconds in passes) for name in passes[0]}
    ratio = {
        name: statistics.median(seconds["plain"] / seconds[name] for seconds in passes) for name in ("cold", "cached")
    }
    return {
        "images": images, "pixels": pixels, "size": size, "repeats": repeats, "images_per_second": rates,
        "seconds": passes, "ratio": ratio, "reached": ratio["cached"] >= TARGET,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    ratio, where = result["ratio"], f"{result['pixels']} px files"
    cached = f"{where}, cached: images/s / plain pipeline's"
    return [
        (f"{where}, cold: images/s / plain pipeline's", f"{ratio['cold']:.2f}"),
        (cached, f"{ratio['cached']:.2f}", f">= {TARGET:g}", result["reached"]),
    ]


def _pass(files: Sequence[Path], cache: Path, size: int, seed: int) -> dict[str, float]:
    """CPU seconds of each pipeline over all files; the batches of the three are neighbours in time."""
    source, store = random.Random(seed), ImageStore(files, size, cache, threads=1)
    seconds = dict.fromkeys(("plain", "cold", "cached"), 0.0)
    for start in range(0, len(files), BATCH):
        rows = np.arange(start, min(start + BATCH, len(files)))
        seconds["plain"] += cpu_seconds(plain_batch, [files[row] for row in rows.tolist()], size, source)
        for name in ("cold", "cached"):
            seconds[name] += cpu_seconds(our_batch, store, rows, size)
    report("  ".join(f"{name} {len(files) / taken:.0f} images/s" for name, taken in seconds.items()))
    return seconds


def our_batch(store: ImageStore, rows: np.ndarray, size: int) -> Tensor:
    """Rows as the trainer makes them ready: (B, 3, size, size), normalised."""
    drawn = Augment().draw(len(rows), torch.Generator().manual_seed(int(rows[0])))
    return prepare(store.load(rows), drawn, size, MEAN, STD)


# The plain pipeline


@dataclass(frozen=True)
class PlainDraw:
    """The random numbers of one image."""

    box: tuple[int, int, int, int]  # left, top, right, bottom of the crop, in pixels
    flip: bool
    order: tuple[str, ...]  # of OPERATIONS
    brightness: float
    contrast: float
    saturation: float
    hue: float  # turns of the colour circle
    grayscale: bool


def plain_draw(width: int, height: int, augment: Augment, source: random.Random) -> PlainDraw:
    """Draw for one image of this size, in the ranges of `augment`."""
    factors = {
        name: source.uniform(max(0.0, 1 - getattr(augment, name)), 1 + getattr(augment, name))
        for name in ("brightness", "contrast", "saturation")
    }
    return PlainDraw(
        box=_plain_box(width, height, augment, source),
        flip=source.random() < augment.flip,
        order=tuple(source.sample(OPERATIONS, len(OPERATIONS))),
        hue=source.uniform(-augment.hue, augment.hue),
        grayscale=source.random() < augment.grayscale,
        **factors,
    )


def _plain_box(width: int, height: int, augment: Augment, source: random.Random) -> tuple[int, int, int, int]:
    """RandomResizedCrop's rule: a box of random area and shape that fits, else the largest one in the middle."""
    low, high = augment.ratio
    for _ in range(ATTEMPTS):
        area = width * height * source.uniform(*augment.scale)
        ratio = math.exp(source.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = source.randint(0, width - w), source.randint(0, height - h)
            return left, top, left + w, top + h
    shape = min(max(width / height, low), high)
    w, h = min(width, round(height * shape)), min(height, round(width / shape))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def plain_apply(image: Image.Image, drawn: PlainDraw, size: int) -> Image.Image:
    """Crop and resize, flip, four colour operations in their order, grayscale: an 8-bit image after each."""
    image = image.crop(drawn.box).resize((size, size), Image.Resampling.BILINEAR)
    if drawn.flip:
        image = ImageOps.mirror(image)
    for name in drawn.order:
        image = PLAIN_COLOURS[name](image, getattr(drawn, name))
    return image.convert("L").convert("RGB") if drawn.grayscale else image


def plain_hue(image: Image.Image, turns: float) -> Image.Image:
    """Turn the hue channel of HSV, which has 8 bits and goes round."""
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.int16(turns * 255).astype(np.uint8)  # uint8 wraps
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


PLAIN_COLOURS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "saturation": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "hue": plain_hue,
}


def plain_tensor(image: Image.Image) -> Tensor:
    """(3, H, W), normalised with ImageNet's statistics as the lineage does."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    return pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))


def plain_batch(files: Sequence[Path], size: int, source: random.Random | None) -> Tensor:
    """A batch sample by sample, (B, 3, size, size): augmented with numbers from `source`, or only resized."""
    return torch.stack([_plain_sample(file, size, source) for file in files])


def _plain_sample(file: Path, size: int, source: random.Random | None) -> Tensor:
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    if source is None:
        return plain_tensor(image.resize((size, size), Image.Resampling.BILINEAR))
    return plain_tensor(plain_apply(image, plain_draw(*image.size, Augment(), source), size))

"""How each cost grows with images, patches, classes and domains: the exponent of a line through log-log times.

    measure()["rows"]                   # [{"cost": "training step", "over": "patches", "exponent": ...}, ...]

An exponent of 1 is proportional, 2 is the square; below 1 a part does not grow at all. Each time is the fastest of a
few, in processor seconds, and sizes are small: what a cost becomes at its largest is for the other subjects to say.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Line, at_least_one, cpu_seconds, one_thread, random_features, report, write_images
from benchmarks.peers import our_mixture
from benchmarks.pipeline import MEAN, STD
from patchgen.config import Config
from patchgen.data.augment import Augment
from patchgen.data.images import ImageStore
from patchgen.data.loaders import Batch, prepare
from patchgen.discovery import clustering_accuracy
from patchgen.discovery.kmeans import nearest
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.model.backbone import load_backbone
from patchgen.model.patchgen import PatchGen
from patchgen.train.loop import plain_step
from patchgen.train.optim import make_optimizer

Work = Callable[[], object]
SMALL = {"repeats": 1}
PATCH, DIM = 14, 64  # of the backbone `tiny`


def measure(*, repeats: int = 3) -> dict[str, Any]:
    """Time every cost at every size."""
    at_least_one(repeats=repeats)
    rows = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for (cost, over), (make, sizes) in GROWTHS.items():
            seconds = [fastest(make(size, Path(folder)), repeats) for size in sizes]
            rows.append({"cost": cost, "over": over, "sizes": list(sizes), "seconds": seconds,
                         "exponent": fit_exponent(sizes, seconds)})  # fmt: skip
            report(f"{cost} over {over}: {rows[-1]['exponent']:.2f}")
    return {"repeats": repeats, "rows": rows}


def lines(found: dict[str, Any]) -> list[Line]:
    return [(f"{row['cost']} over {row['over']}: exponent", f"{row['exponent']:.2f}") for row in found["rows"]]


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    if len(sizes) < 2 or min(*sizes, *seconds) <= 0:
        raise ValueError(f"an exponent needs two sizes or more, all positive, not {list(sizes)} and {list(seconds)}")
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def fastest(work: Work, repeats: int) -> float:
    """Processor seconds of the fastest of so many, after one that warms up."""
    work()
    return max(min(cpu_seconds(work) for _ in range(repeats)), 1e-9)


def _step(images: int = 12, patches: int = 64, classes: int = 7, domains: int = 3) -> Work:
    """A PatchGen step on the backbone `tiny`."""
    side = PATCH * round(patches**0.5)
    config = Config("random", "none", backbone="tiny", image_size=side)
    method = make_method(config)
    model = build_on(load_backbone("tiny", image_size=side), config, method, classes)
    method.sources = tuple(range(domains))
    method.setup(model)
    index = torch.arange(images)
    batch = Batch(torch.randn(images, 3, side, side), index % classes, index % domains, index)
    return partial(plain_step, method, model, make_optimizer(model, config, method), batch)


def _read(images: int, folder: Path, cached: bool) -> Work:
    place = folder / f"{images}"
    files = sorted(place.glob("*.jpg")) or write_images(place, images, 128)
    store = ImageStore(files, 112, folder / "cache" if cached else None, threads=1)
    draw = Augment().draw(images, torch.Generator().manual_seed(0))
    return lambda: prepare(store.load(np.arange(images)), draw, 112, MEAN, STD)


def _select(patches: int) -> Work:
    module, tokens = PatchGen(DIM, patches, grid=(1, patches)), torch.randn(4, patches, DIM)

    def learn() -> None:
        out = module(tokens)
        (out.selected.square().mean() + out.mask.mean()).backward()

    return learn


def _kmeans(points: int, classes: int) -> Work:
    x, centres = (each.cpu() for each in random_features(points, DIM, classes))
    return lambda: nearest(x, centres)


def _mixture(points: int, classes: int) -> Work:
    x, centres = (each.cpu() for each in random_features(points, DIM, classes))
    return lambda: our_mixture(x, centres)


def _match(points: int, classes: int) -> Work:
    truth, noise = np.arange(points) % classes, np.random.default_rng(0)
    found = np.where(noise.random(points) < 0.5, truth, noise.integers(0, classes, points))
    return lambda: clustering_accuracy(truth, found, range(classes))


GROWTHS: dict[tuple[str, str], tuple[Callable[[int, Path], Work], Sequence[int]]] = {
    ("training step", "images"): (lambda n, _: _step(images=n), (6, 24, 96)),
    ("training step", "patches"): (lambda n, _: _step(patches=n), (64, 256, 1024)),
    ("training step", "classes"): (lambda n, _: _step(classes=n), (10, 100, 1000)),
    ("training step, 8 images a domain", "domains"): (lambda n, _: _step(images=8 * n, domains=n), (2, 4, 8)),
    ("PatchGen module", "patches"): (lambda n, _: _select(n), (256, 1024, 4096)),
    ("decoding and augmenting", "images"): (lambda n, folder: _read(n, folder, cached=False), (8, 32, 128)),
    ("cached images and augmenting", "images"): (lambda n, folder: _read(n, folder, cached=True), (8, 32, 128)),
    ("k-means pass", "images"): (lambda n, _: _kmeans(n, 50), (2000, 8000, 32000)),
    ("k-means pass", "classes"): (lambda n, _: _kmeans(8000, n), (25, 100, 400)),
    ("mixture", "images"): (lambda n, _: _mixture(n, 20), (1000, 4000, 16000)),
    ("mixture", "classes"): (lambda n, _: _mixture(4000, n), (10, 40, 160)),
    ("Hungarian match", "images"): (lambda n, _: _match(n, 50), (5000, 20000, 80000)),
    ("Hungarian match", "classes"): (lambda n, _: _match(20000, n), (100, 300, 900)),
}

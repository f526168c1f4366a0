"""Images per second of a model on this machine: the model alone, and all of `predict` from JPEG files.

    rates = measure_predict(untrained_predictor("dinov2-small", "patchgen-select", 224), batches=(1, 8))
    rates["batches"][0]["images_per_second"]        # {"model": ..., "predict": ...}
    rates["batches"][0]["conclusive"]               # False if repeated measurements differ too much

`model` is forward passes over images that are already decoded and normalised; `predict` also reads, decodes, resizes,
normalises and calibrates, with decoding in parallel threads. Both alternate, and seconds are wall-clock time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchgen.config import Config
from patchgen.data.images import decode
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.model.backbone import load_architecture
from patchgen.predict.predictor import Prediction, Predictor
from patchgen.predict.runtime import RuntimeName

LARGEST_SPREAD = 0.15  # of repeated measurements of the same thing: slowest / fastest - 1
BATCHES = (1, 8, 32)
CLASSES = tuple(f"class {i}" for i in range(7))
Report = Callable[[str], None]


def untrained_predictor(source: str, method: str, image_size: int) -> Predictor:
    """A predictor with a random head, and random weights for a named backbone; as fast as a trained one."""
    config = Config("random", "none", method=method, backbone=source, image_size=image_size)
    made = make_method(config)
    made.class_names = CLASSES
    return Predictor(build_on(load_architecture(source, image_size), config, made, len(CLASSES)), CLASSES, config)


def measure_predict(
    predictor: Predictor,
    *,
    images: int = 64,
    pixels: int = 512,
    batches: Sequence[int] = BATCHES,
    repeats: int = 3,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Time passes over generated JPEG files, which are deleted afterwards.

    Args:
        images: JPEG files.
        pixels: Their side.
        batches: Images per forward pass, each measured.
        repeats: Passes of each kind, alternating, after a warm-up.
        report: Called with one line per batch size and pass, `len(batches) * repeats` times.
    """
    if not batches or min(batches) < 1:
        raise ValueError(f"batches must be one or more numbers of at least 1, not {list(batches)}")
    for name, value, least in (("images", images, max(batches)), ("pixels", pixels, 1), ("repeats", repeats, 2)):
        if value < least:
            reason = ", the largest of batches" if name == "images" else ""
            raise ValueError(f"{name} must be at least {least}{reason}, not {value}")
    with tempfile.TemporaryDirectory() as folder:
        files = write_images(Path(folder), images, pixels)
        rows = [_measure_batch(predictor, files, batch, repeats, report) for batch in batches]
    first = rows[0]["images_per_second"]["model"]
    for row in rows:
        row["model_over_first"] = row["images_per_second"]["model"] / first
    return {
        "backbone": predictor.model.backbone.resolved,
        "method": predictor.config.method,
        "image_size": predictor.config.image_size,
        "images": images,
        "pixels": pixels,
        "repeats": repeats,
        "machine": {"device": str(predictor.device), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "batches": rows,
    }


def _measure_batch(
    predictor: Predictor, files: Sequence[Path], batch: int, repeats: int, report: Report
) -> dict[str, Any]:
    decoded = [decode(file, predictor.config.image_size, predictor.interpolation) for file in files]
    inputs = [predictor.inputs(decoded[i : i + batch]) for i in range(0, len(files), batch)]

    @torch.inference_mode()
    def model() -> None:
        for part in inputs:
            predictor.model(part).logits.cpu()  # waits for the accelerator

    def predict() -> None:
        for _ in predictor.predict(files, batch):
            pass

    works: dict[str, Callable[[], None]] = {"model": model, "predict": predict}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
        if turn:
            rates = ", ".join(f"{name} {len(files) / taken[-1]:.1f} images/s" for name, taken in seconds.items())
            report(f"batch {batch}: {rates}")
    return {"batch": batch, **rates_of(seconds, len(files))}


def measure_runtimes(
    predictor: Predictor,
    files: Sequence[Path],
    runtimes: Sequence[RuntimeName] = ("torch", "auto"),
    *,
    batch: int = 32,
    repeats: int = 5,
    report: Report = lambda _: None,
    say: Report = lambda _: None,
) -> dict[str, Any]:
    """Time all of `predict` and the model alone on each runtime, alternating, and compare their predictions.

    Args:
        files: Images.
        runtimes: The others are compared with the first.
        batch: Images per forward pass.
        repeats: Turns, after a warm-up.
        report: Called with one line per turn.
        say: Called with the description of each runtime.
    """
    if len(runtimes) < 2 or repeats < 2 or not files or batch < 1:
        raise ValueError("two or more runtimes, 2 or more repeats, an image and a batch of at least 1 are needed")
    engines = {name: predictor.use(name, say).runtime for name in runtimes}
    decoded = [decode(file, predictor.config.image_size, predictor.interpolation) for file in files]
    seconds: dict[str, dict[str, list[float]]] = {name: {"model": [], "predict": []} for name in engines}
    answers: dict[str, list[Any]] = {}
    for turn in range(repeats + 1):
        for name, predictor.runtime in engines.items():
            start = time.perf_counter()
            for i in range(0, len(decoded), batch):
                predictor.score(decoded[i : i + batch])
            middle = time.perf_counter()
            answers[name] = list(predictor.predict(files, batch))
            if turn:  # the first warms up
                seconds[name]["model"].append(middle - start)
                seconds[name]["predict"].append(time.perf_counter() - middle)
        if turn:
            report(", ".join(f"{n} {len(files) / seconds[n]['predict'][-1]:.1f} images/s" for n in engines))
    first = runtimes[0]
    rows = {
        name: {
            "engine": engine.name if engine else "torch",
            "speed": ratio_of(seconds[first]["predict"], seconds[name]["predict"]),
            "predict_over_model": ratio_of(seconds[name]["model"], seconds[name]["predict"]),
            **apart(answers[first], answers[name]),
        }
        for name, engine in engines.items()
    }
    machine = {"device": str(predictor.device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about = {"backbone": predictor.model.backbone.resolved, "image_size": predictor.config.image_size}
    return {**about, "images": len(files), "batch": batch, "machine": machine, "runtimes": rows, "seconds": seconds}


def apart(truth: Sequence[Prediction], found: Sequence[Prediction]) -> dict[str, float | None]:
    """Differences between predictions for the same images."""
    pairs = list(zip(truth, found, strict=True))
    masks = [np.abs(a.mask - b.mask).max() for a, b in pairs if a.mask is not None and b.mask is not None]
    return {
        "same_class": float(np.mean([a.label == b.label for a, b in pairs])),
        "probabilities": float(max(np.abs(a.probabilities - b.probabilities).max() for a, b in pairs)),
        "masks": float(max(masks)) if masks else None,
    }


def ratio_of(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """Speed-up per turn: median, quartiles, and whether these are close enough to be conclusive."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high], "conclusive": (high - low) / median <= LARGEST_SPREAD}


def rates_of(seconds: Mapping[str, Sequence[float]], images: int) -> dict[str, Any]:
    """Medians of repeated passes over `images` images, their ratio, and whether the repetitions agree."""
    rates = {name: images / statistics.median(taken) for name, taken in seconds.items()}
    spread = {name: max(taken) / min(taken) - 1 for name, taken in seconds.items()}
    return {
        "images_per_second": rates,
        "predict_over_model": rates["predict"] / rates["model"],
        "spread": spread,
        "conclusive": max(spread.values()) <= LARGEST_SPREAD,
        "seconds": {name: list(taken) for name, taken in seconds.items()},
    }


def write_images(folder: Path, count: int, pixels: int, seed: int = 0) -> list[Path]:
    """JPEG files as costly to decode as photographs: coarse shapes with some grain, about two bits per pixel."""
    generator, files = np.random.default_rng(seed), []
    for i in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), np.uint8)).resize((pixels, pixels))
        grain = generator.normal(0, 6, (pixels, pixels, 1))
        files.append(folder / f"{i:05}.jpg")
        Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(files[-1], quality=85)
    return files

"""`predict` from file to prediction on the fastest runtime that is installed, against torch in float32.

    result = measure(model="runs/4f2a9c01b7de", files=("photos",), images=2000)
    result["runtimes"]["auto"]["speed"]          # median and quartiles of how many times as fast, turn by turn

Without a model, an untrained one of a named architecture takes its place: it costs the same.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Line, report, write_images
from patchgen.commands.options import find_images
from patchgen.config import Config
from patchgen.data.images import decode
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.model.backbone import load_architecture
from patchgen.predict.predictor import Prediction, Predictor, load_predictor
from patchgen.predict.runtime import RuntimeName

SPEED, PIPELINE, SAME, MASKS = 2.3, 0.9, 0.999, 0.02  # what is wanted
LARGEST_SPREAD = 0.15  # of the quartiles of repeated turns, relative to their median
CLASSES = tuple(f"class {i}" for i in range(7))
SMALL = {"source": "tiny", "image_size": 28, "images": 6, "pixels": 32, "batch": 3, "repeats": 2,
         "runtimes": ("torch", "torch")}  # fmt: skip


def measure(
    model: str | None = None,
    files: tuple[str, ...] = (),
    *,
    source: str = "dinov2-small",
    method: str = "patchgen-select",
    image_size: int = 224,
    images: int = 200,
    pixels: int = 512,
    batch: int = 32,
    repeats: int = 3,
    runtimes: tuple[RuntimeName, ...] = ("torch", "auto"),
) -> dict[str, Any]:
    """Runtimes take turns over the same files.

    Args:
        model: A model or run folder; an untrained model of `source`, `method` and `image_size` when left out.
        files: Images, folders or patterns; generated JPEG files when left out.
        images: At most so many files.
        pixels: Side of generated files.
        batch: Images per forward pass.
        repeats: Timed turns, after one that warms up.
        runtimes: Two or more; the others are compared with the first.
    """
    predictor = load_predictor(model) if model else untrained_predictor(source, method, image_size)
    with tempfile.TemporaryDirectory() as place:
        found = find_images(files)[:images] if files else write_images(Path(place), images, pixels)
        return measure_runtimes(predictor, found, runtimes, batch, repeats)


def lines(result: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    about = f"{result['image_size']} px, {result['images']:,} images, {result['machine']['threads']} threads"
    for number, row in enumerate(result["runtimes"].values()):
        name, masks = f"{row['engine']}, {about}", row["masks"]
        if number:
            rows.append(_judged(f"{name}: times as fast as torch", row["speed"], SPEED))
            said = [
                f"{100 * row['same_class']:.2f} % the same class",
                *([] if masks is None else [f"masks {masks:.1e}"]),
            ]
            good = row["same_class"] >= SAME and (masks is None or masks <= MASKS)
            rows.append((f"{name}: beside torch's answers", ", ".join(said), f">= {100 * SAME} %, <= {MASKS}", good))
        rows.append(_judged(f"{name}: `predict` / the model alone", row["predict_over_model"], PIPELINE))
    return rows


def _judged(what: str, ratio: dict[str, Any], least: float) -> Line:
    """Value and target; no verdict where repeated turns are too far apart."""
    value = f"{ratio['median']:.2f} ({ratio['quartiles'][0]:.2f}-{ratio['quartiles'][1]:.2f})"
    if not ratio["conclusive"]:
        return what, f"{value}, inconclusive", f">= {least:g}"
    return what, value, f">= {least:g}", ratio["median"] >= least


def untrained_predictor(source: str, method: str, image_size: int) -> Predictor:
    """A predictor with a random head, and random weights for a named backbone; as fast as a trained one."""
    config = Config("random", "none", method=method, backbone=source, image_size=image_size)
    made = make_method(config)
    made.class_names = CLASSES
    return Predictor(build_on(load_architecture(source, image_size), config, made, len(CLASSES)), CLASSES, config)


def measure_runtimes(
    predictor: Predictor, files: Sequence[Path], runtimes: Sequence[RuntimeName], batch: int, repeats: int
) -> dict[str, Any]:
    """Time all of `predict` and the model alone on each runtime, in turn, and compare their predictions."""
    if len(runtimes) < 2 or repeats < 2 or not files or batch < 1:
        raise ValueError("two or more runtimes, 2 or more repeats, an image and a batch of at least 1 are needed")
    engines = {name: predictor.use(name, report).runtime for name in runtimes}
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


def apart(truth: Sequence[Prediction], answers: Sequence[Prediction]) -> dict[str, float | None]:
    """Differences between predictions for the same images."""
    pairs = list(zip(truth, answers, strict=True))
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

"""`predict` from file to prediction on the fastest runtime that is installed, against torch in float32.

    found = measure(model="runs/4f2a9c01b7de", files=("photos",), images=2000)
    found["runtimes"]["auto"]["speed"]          # median and quartiles of how many times as fast, turn by turn

Without a model, an untrained one of a named architecture takes its place: it costs the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Line, report
from benchmarks.throughput import measure_runtimes, untrained_predictor, write_images
from patchgen.commands.inputs import find_images
from patchgen.predict.predictor import load_predictor
from patchgen.predict.runtime import RuntimeName

SPEED, PIPELINE, SAME, MASKS = 2.3, 0.9, 0.999, 0.02  # what is wanted
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
        return measure_runtimes(predictor, found, runtimes, batch=batch, repeats=repeats, report=report, say=report)


def lines(found: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    about = f"{found['image_size']} px, {found['images']:,} images, {found['machine']['threads']} threads"
    for number, row in enumerate(found["runtimes"].values()):
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

"""Export a classifier for WSInfer and QuPath's WSInfer extension: TorchScript and a config.json.

    differences = export_wsinfer(load_predictor("tiles-model"), Path("tiles-wsinfer"), images, spacing=0.5, patch=224)

    torchscript_model.pt   normalised pixels (N, 3, S, S) -> logits (N, C) over the temperature; softmax is WSInfer's
    config.json            spec_version 1.0: classes, patch size and spacing in microns per pixel, and the transforms

A patch of `patch` pixels at `spacing` microns per pixel is resized to S x S, divided by 255 and normalised, all by the
program. Masks are not part of the format.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchgen.common.files import replacing_folder
from patchgen.common.text import json_text
from patchgen.model.classifier import Classifier
from patchgen.model.tuning import merged
from patchgen.predict.export import BATCHES, Difference, float32_noise, judged, refuse_stain
from patchgen.predict.predictor import Predictor

MODEL, CONFIG = "torchscript_model.pt", "config.json"


class Logits(nn.Module):
    """Normalised pixels -> logits whose softmax is calibrated."""

    def __init__(self, model: Classifier, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixels).logits / self.temperature


def check_folder(target: Path) -> None:
    """Raise ValueError if the target is anything but an earlier export."""
    if target.is_file():
        raise ValueError(f"--out {target} is a file; for WSInfer it is a folder: choose another name")
    odd = [path.name for path in target.iterdir() if path.name not in (MODEL, CONFIG)] if target.is_dir() else []
    if odd:
        raise ValueError(f"--out {target} is not empty (it holds {sorted(odd)[0]}); choose another folder")


def export_wsinfer(
    predictor: Predictor, target: Path, images: Sequence[np.ndarray], *, spacing: float, patch: int
) -> dict[str, Difference]:
    """Write the folder and return the largest difference of the probabilities from the original's.

    Args:
        images: (S, S, 3) uint8, on which the outputs are compared.
        spacing: Microns per pixel at which patches are cut.
        patch: Their side in pixels, before they are resized.

    Raises:
        ValueError: a difference above `NOISE_FACTOR` times the network's rounding, or a model that cannot be traced or
            normalises stains; no folder is written then.
    """
    check_folder(target)
    refuse_stain(predictor, "WSInfer")
    predictor.score(images[:1])  # refuses a model whose output is not finite
    with replacing_folder(target) as temporary:
        try:
            _trace(predictor).save(str(temporary / MODEL))
        except (RuntimeError, torch.jit.TracingCheckError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"method {predictor.config.method!r} cannot become TorchScript: {reason}") from error
        text = json_text(config_of(predictor, spacing, patch))
        (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
        difference = compare(predictor, temporary / MODEL, images)
        return judged({"probabilities": difference}, float32_noise(predictor, images), "the TorchScript file")


def config_of(predictor: Predictor, spacing: float, patch: int) -> dict[str, Any]:
    """The fields that WSInfer's schema 1.0 requires."""
    backbone, size = predictor.model.backbone, predictor.config.image_size
    return {
        "spec_version": "1.0",
        "architecture": f"patchgen {predictor.config.method} on {backbone.resolved}",
        "num_classes": len(predictor.classes),
        "class_names": list(predictor.classes),
        "patch_size_pixels": patch,
        "spacing_um_px": spacing,
        "transform": [
            {"name": "Resize", "arguments": {"size": size}},
            {"name": "ToTensor"},
            {"name": "Normalize", "arguments": {"mean": list(backbone.mean), "std": list(backbone.std)}},
        ],
    }


def _trace(predictor: Predictor) -> torch.jit.ScriptModule:
    """On the CPU, from which any device can load it."""
    size = predictor.config.image_size
    whole = Logits(merged(predictor.model.cpu()), predictor.confidence.temperature).eval()
    example = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # warns of fixed shapes, which are intended except for N, and `compare` checks that
            return torch.jit.trace(whole, example, check_trace=False)
    finally:
        predictor.model.to(predictor.device)


@torch.inference_mode()
def compare(predictor: Predictor, path: Path, images: Sequence[np.ndarray]) -> float:
    """The largest absolute difference of a probability over the images, at several batch sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the format is WSInfer's choice
        loaded, worst = torch.jit.load(str(path), map_location="cpu"), 0.0
    for batch in BATCHES:
        for start in range(0, len(images) if batch > 1 else 1, batch):
            part = images[start : start + batch]
            found = loaded(predictor.inputs(part).cpu()).softmax(1).numpy()
            gap = float(np.abs(found - np.stack([one.probabilities for one in predictor.score(part)])).max())
            worst = gap if np.isnan(gap) else max(worst, gap)  # nan must not look like agreement
    return worst

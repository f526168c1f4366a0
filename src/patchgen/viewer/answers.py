"""Predictions, masks, rankings and predictions with patches removed, as JSON for the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from patchgen.diagnose.faithfulness import OPERATORS, pixel_answers
from patchgen.predict.attribution import CONTROLS, RANKINGS, available, check_rankings
from patchgen.predict.predictor import NOT_FINITE, Predictor

# `swap` needs another image, so it stays with `patchgen diagnose`
PERTURBATIONS = {"blur": "blurred", "mean": "the image's mean colour"}


def describe(predictor: Predictor) -> dict[str, Any]:
    """What the page needs to know about a model."""
    return {
        "method": predictor.config.method,
        "classes": list(predictor.classes),
        "image_size": predictor.config.image_size,
        "grid": list(predictor.model.grid),
        "has_mask": predictor.model.has_mask,
        "rankings": list(available(predictor.model)),
        "controls": list(CONTROLS),
        "perturbations": PERTURBATIONS,
        "calibrated": predictor.confidence.temperature != 1.0,
        "temperature": predictor.confidence.temperature,
        "knows_unlike": predictor.confidence.familiar is not None,
    }


def scored(predictor: Predictor, pixels: np.ndarray) -> dict[str, Any]:
    """Pixels (S, S, 3) uint8 -> classes by decreasing probability, and the mask (h, w), if any."""
    [scores] = predictor.score([pixels])
    mask = None if scores.mask is None else _grid(scores.mask)
    return {**_classes(predictor, scores.probabilities), "mask": mask, "unlike_training": scores.unlike_training}


def ranked(predictor: Predictor, pixels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Scores (h, w) of the patches by each ranking, for the predicted class; ValueError for one that is unavailable."""
    check_rankings(predictor.model, tuple(names), "this model")
    images = predictor.inputs([pixels])
    with torch.no_grad():
        target = predictor.model(images).logits.argmax(1)
    scores = {name: RANKINGS[name](predictor.model, images, target)[0].float().cpu().numpy() for name in names}
    maps = {name: _grid(values.reshape(predictor.model.grid)) for name, values in scores.items()}
    return {"label": predictor.classes[int(target)], "rankings": maps}


@torch.no_grad()
def perturbed(predictor: Predictor, pixels: np.ndarray, off: Sequence[int], operator: str) -> dict[str, Any]:
    """The classes after the pixels of patches `off` (row by row, from 0) are perturbed, as in `diagnose`."""
    height, width = predictor.model.grid
    if operator not in PERTURBATIONS:
        raise ValueError(f"operator must be one of {', '.join(PERTURBATIONS)}, not {operator!r}")
    if any(not 0 <= patch < height * width for patch in off):
        raise ValueError(f"patches are numbered 0 to {height * width - 1} in this model")
    images = predictor.pixels([pixels])  # (1,3,S,S)
    keep = torch.ones(1, height * width, dtype=torch.bool, device=predictor.device)
    keep[0, list(off)] = False
    replacement = OPERATORS[operator](images, images, images.shape[-1] // width)
    unlike: list[bool | None] = [None]

    def probabilities(seen: torch.Tensor) -> torch.Tensor:
        out = predictor.model(predictor.model.backbone.normalised(seen))
        if predictor.confidence.familiar:
            unlike[:] = predictor.confidence.familiar.unlike(out.features)
        return predictor.confidence.probabilities(out.logits)

    answer = pixel_answers(probabilities, images, replacement, predictor.model.grid)
    changed = answer(torch.zeros(1, dtype=torch.long, device=predictor.device), keep)[0].cpu().numpy()
    return {**_classes(predictor, changed), "unlike_training": unlike[0], "off": len(set(off))}


def _classes(predictor: Predictor, probabilities: np.ndarray) -> dict[str, Any]:
    if not np.isfinite(probabilities).all():
        raise ValueError(NOT_FINITE)
    order = np.argsort(-probabilities, kind="stable")
    rows = [{"class": predictor.classes[i], "probability": float(probabilities[i])} for i in order]
    return {"label": rows[0]["class"], "confidence": rows[0]["probability"], "classes": rows}


def _grid(values: np.ndarray) -> list[list[float]]:
    """Six significant digits: attention over many patches is small, and rounding must not create ties."""
    return [[float(f"{value:.6g}") for value in row] for row in values]

"""From one record per image to one row per ranking: means and their standard errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from patchgen.diagnose.faithfulness import area

Record = dict[str, Any]
CLASSES = ("true", "predicted")


def mean_and_error(values: Iterable[float | bool | None]) -> dict[str, float] | None:
    """Mean over images and its standard error; images without the value are left out; None if all are."""
    known = np.array([v for v in values if v is not None], dtype=float)
    if not len(known):
        return None
    error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else 0.0
    return {"mean": float(known.mean()), "error": float(error)}


def summarise(records: Sequence[Record], patches: int) -> Record:
    """The summary of one run for the page, the figures and the claims."""
    return {
        "images": len(records),
        "patches": patches,
        "accuracy": mean_and_error(r["correct"] for r in records),
        "selected": mean_and_error(r["selected"] for r in records),
        "mask": mask_summary(records),
        "auroc": _auroc(records),
        "perturbation": {op: _perturbation(records, op) for op in records[0]["perturbation"]},
        "curves": {name: _curve(records, name, patches) for name in records[0]["curves"]},
    }


def mask_summary(records: Sequence[Record]) -> Record | None:
    """Mean statistics of the masks, how many select all patches or none, and a verdict."""
    if "mask" not in records[0]:
        return None
    means = {name: mean_and_error(r["mask"][name] for r in records) for name in records[0]["mask"]}
    full = sum(r["selected"] == 1 for r in records)
    empty = sum(r["selected"] == 0 for r in records)
    return {**means, "full": full, "empty": empty, "verdict": mask_verdict(full, empty, len(records))}


def mask_verdict(full: int, empty: int, images: int) -> str:
    """A verdict on the masks: a selection of all patches, or of none, cannot be tested."""
    if full == images:
        return "all 1: the mask selects every patch of every image, so there is no selection to test"
    if empty == images:
        return "all 0: the mask selects no patch of any image, so there is no selection to test"
    if full + empty > images / 2:
        return f"mostly constant: all patches are selected in {full} of {images} images and none in {empty}"
    if full + empty:
        return f"selective, but all patches are selected in {full} of {images} images and none in {empty}"
    return "selective: in every image some patches are selected and some are not"


def paired(first: Sequence[float], second: Sequence[float]) -> Record:
    """Mean difference over the same images, its error, and whether it exceeds two of them."""
    difference = mean_and_error(np.subtract(first, second, dtype=float).tolist())
    if difference is None:
        raise ValueError("a difference needs at least one image")
    return {**difference, "clear": abs(difference["mean"]) > 2 * difference["error"]}


def _auroc(records: Sequence[Record]) -> Record | None:
    if "auroc" not in records[0]:
        return None
    return {name: mean_and_error(r["auroc"][name] for r in records) for name in records[0]["auroc"]}


def _perturbation(records: Sequence[Record], operator: str) -> Record:
    perturbed = [r["perturbation"][operator] for r in records]
    ends = {name: _answer(r[name] for r in perturbed) for name in ("nothing", "everything")}
    rankings = [name for name in perturbed[0] if name not in ends]
    return {
        **ends,
        "rankings": {
            name: {side: _answer(r[name][side] for r in perturbed) for side in ("keep", "perturb")} for name in rankings
        },
    }


def _answer(answers: Iterable[Record]) -> Record:
    rows = list(answers)
    return {
        "accuracy": mean_and_error(r["correct"] for r in rows),
        **{f"p_{which}": mean_and_error(r[which] for r in rows) for which in CLASSES},
    }


def _curve(records: Sequence[Record], name: str, patches: int) -> Record:
    summary: Record = {}
    for way in ("insertion", "deletion"):
        curves = {which: np.array([r["curves"][name][way][which] for r in records]) for which in CLASSES}  # (N,steps+1)
        summary[way] = {which: curve.mean(0).tolist() for which, curve in curves.items()}
        summary[f"{way}_auc"] = {which: mean_and_error(area(curve, patches)) for which, curve in curves.items()}
    return summary

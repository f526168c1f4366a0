"""The level of a mask: which patches count as selected, calibrated after training on held-out source images.

A classifier with a selection depends on the ratios of mask values within an image, not on their level: halving all of
them changes nothing. So 0.5 has no meaning by itself. What has a meaning is r, the weight of a patch relative to the
average patch of its image. The displayed mask is sigmoid(scale * log r + shift):

1. 0.5 corresponds to r = 1: selected patches have more weight than they would have without a selection;
2. if removing all other patches costs the classifier more than one standard error of its accuracy, 0.5 moves to a
   smaller r until it does not: the selected patches suffice;
3. the scale maps an average selected patch to 0.88.

Only the displayed mask changes, never what the classifier reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from patchgen.model.classifier import Output
from patchgen.model.selector import log_of, relative

IMAGES = 240  # of source validation, at most
BATCH = 60
LOWER = (0.0, -0.5, -1.0, -2.0, -3.0)  # thresholds of log r to try, in this order
FLAT = 1e-2  # below this standard deviation of log r there is no selection: every patch is read
EVERYTHING = (1.0, 10.0)  # the level at which all patches are displayed as selected
STRONG = 2.0  # the logit of 0.88

Classify = Callable[[np.ndarray, Tensor | None], Output]  # rows, and a mask that replaces the model's own


@torch.inference_mode()
def find_level(classify: Classify, rows: np.ndarray, label: np.ndarray, gain: float) -> tuple[float, float]:
    """Scale and shift of log r.

    Args:
        classify: The model's output for rows.
        rows: Held-out source images.
        label: (N,) class ids of the whole table.
        gain: Exponent of the mask in the weight r.
    """
    if len(rows) > IMAGES:
        rows = rows[np.linspace(0, len(rows) - 1, IMAGES).astype(int)]
    parts = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    outputs = [classify(part, None) for part in parts]
    masks = [out.own_mask for out in outputs if out.own_mask is not None]
    reads = [relative(gain * log_of(mask)) for mask in masks]  # (B, P) each
    weight = torch.cat(reads)
    if not weight.std() > FLAT:
        return EVERYTHING
    accuracy = _accuracy([out.logits for out in outputs], parts, label)
    error = math.sqrt(max(accuracy * (1 - accuracy), 1 / len(rows)) / len(rows))
    for threshold in LOWER:
        kept = [torch.where(read >= threshold, mask, 0) for read, mask in zip(reads, masks, strict=True)]
        logits = [classify(part, mask).logits for part, mask in zip(parts, kept, strict=True)]
        above = weight >= threshold
        if above.all():
            break
        if _accuracy(logits, parts, label) >= accuracy - error:
            scale = STRONG / float(weight[above].mean() - threshold)
            return scale, -scale * threshold
    return EVERYTHING


def _accuracy(logits: list[Tensor], parts: list[np.ndarray], label: np.ndarray) -> float:
    hits = [out.argmax(1).cpu().numpy() == label[part] for out, part in zip(logits, parts, strict=True)]
    return float(np.concatenate(hits).mean())

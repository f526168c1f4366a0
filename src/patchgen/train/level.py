"""The level of a mask: which patches count as selected, decided after training on held-out source images.

A classifier that reads a selection depends on how mask values compare within an image, not on their level: all of them
halved give the same answer. So 0.5 means nothing by itself. What does mean something is r, how much of a patch is read
compared with the average patch of its image. The mask that is shown is sigmoid(scale * log r + shift):

1. 0.5 is where r = 1: what is selected is read more than it would be without a selection;
2. if the classifier loses more than one standard error of its accuracy when all else is taken away, 0.5 moves to a
   smaller r until it does not: what is selected suffices;
3. the scale shows an average selected patch as 0.88.

Only what is shown changes, never what the classifier reads.
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
LOWER = (0.0, -0.5, -1.0, -2.0, -3.0)  # thresholds of log r that are tried, one after the other
FLAT = 1e-2  # where log r deviates less, nothing is selected: every patch is read
EVERYTHING = (1.0, 10.0)  # the level at which all patches are shown as selected
STRONG = 2.0  # the logit of 0.88

Classify = Callable[[np.ndarray, Tensor | None], Output]  # rows, and a mask to use in place of the model's own


@torch.inference_mode()
def find_level(classify: Classify, rows: np.ndarray, label: np.ndarray, gain: float) -> tuple[float, float]:
    """Scale and shift of log r.

    Args:
        classify: The model's output for rows.
        rows: Held-out source images.
        label: (N,) class ids of the whole table.
        gain: The power of the mask that is read.
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

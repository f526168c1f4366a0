"""How well the uncalibrated mask recovers the predictive patches, computed while images are scored.

Calibration changes only the displayed mask, never what the classifier reads, so one pass over the images scores both.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from patchgen.tasks.metrics import mask_recovery

NAMES = ("iou", "kept")


class OwnMasks:
    """Means over images of `NAMES`; `add` in any order, then `record`.

    Args:
        truth: (N, P) predictive patches of each row of the table.
    """

    def __init__(self, truth: np.ndarray) -> None:
        self.truth = truth
        self.totals = torch.zeros(len(NAMES), 2, dtype=torch.float64)  # sum and count of defined values

    def add(self, rows: np.ndarray, mask: Tensor) -> None:
        """Masks (B, P) of some rows, as the classifier uses them."""
        found = mask_recovery(mask.float().cpu().numpy(), self.truth[rows])
        values = np.stack([found[name] for name in NAMES])  # (names, B)
        self.totals += torch.from_numpy(np.stack([np.nansum(values, 1), (~np.isnan(values)).sum(1)], 1))

    def gather(self, fabric: Fabric) -> None:
        """Sum over all ranks."""
        total = fabric.all_reduce(fabric.to_device(self.totals.float()), reduce_op="sum")
        self.totals = cast(Tensor, total).double().cpu()

    def record(self) -> dict[str, float]:
        """The means; names that are undefined for all images are left out."""
        return {name: total / count for name, (total, count) in zip(NAMES, self.totals.tolist(), strict=True) if count}

"""The probability scores of a test record: AUROC, average precision and calibration error of the scored images."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from patchgen.tasks.metrics import probability_scores


class ProbabilityTally:
    """Keeps the probabilities of scored rows in memory, (N, C) float32; `add` in any order, then `record`.

    Args:
        rows: (N,) the rows that will be scored.
        num_classes: Outputs of the classifier.
    """

    def __init__(self, rows: np.ndarray, num_classes: int) -> None:
        self.order = np.argsort(rows)
        self.rows = rows[self.order]
        self.probabilities = torch.zeros(len(rows), num_classes)
        self.label = torch.zeros(len(rows))

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return self.order[np.searchsorted(self.rows, rows)]

    def add(self, rows: np.ndarray, logits: Tensor, label: Tensor) -> None:
        """Logits (B, C) and true classes (B,) of some rows."""
        places = torch.from_numpy(self._places(rows))
        self.probabilities[places] = logits.float().softmax(1).cpu()
        self.label[places] = label.float().cpu()

    def gather(self, fabric: Fabric) -> None:
        """Sum over all ranks: each row was scored by one of them."""
        if fabric.world_size > 1:
            for name in ("probabilities", "label"):
                total = fabric.all_reduce(fabric.to_device(getattr(self, name)), reduce_op="sum")
                setattr(self, name, cast(Tensor, total).cpu())

    def record(self, rows: np.ndarray) -> dict[str, float | None]:
        """`probability_scores` of some of the rows; None if a score is undefined."""
        places = self._places(rows)
        return probability_scores(self.label.numpy()[places].astype(np.int64), self.probabilities.numpy()[places])

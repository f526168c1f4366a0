"""Results per patient: every patient counts once, however many images it has.

Two questions. How accurate are the images of a patient, averaged over patients? And, if all images of a patient have
the same label, is the patient classified correctly from all images: by majority vote, or by their mean probability?
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor


class PatientTally:
    """Counts per group (patient, slide) while rows are scored; `add` in any order, then `record`.

    Args:
        group: Group of each row of the table.
        rows: The rows that will be scored.
        num_classes: Outputs of the classifier.
    """

    def __init__(self, group: tuple[str, ...], rows: np.ndarray, num_classes: int) -> None:
        self.names = sorted({group[row] for row in rows.tolist()})
        place = {name: i for i, name in enumerate(self.names)}
        self.place = {row: place[group[row]] for row in rows.tolist()}
        shape = (len(self.names), num_classes)
        self.votes, self.probability, self.truth = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        self.hits = torch.zeros(shape[0], dtype=torch.float64)

    def add(self, rows: np.ndarray, logits: Tensor, label: Tensor) -> None:
        """Logits (B, C) and true classes (B,) of some rows."""
        of = torch.tensor([self.place[row] for row in rows.tolist()])
        said = logits.float().softmax(1).double().cpu()
        label, best = label.cpu(), said.argmax(1)
        ones = torch.ones(len(of), dtype=torch.float64)
        self.votes.index_put_((of, best), ones, accumulate=True)
        self.truth.index_put_((of, label), ones, accumulate=True)
        self.probability.index_add_(0, of, said)
        self.hits.index_add_(0, of, (best == label).double())

    def gather(self, fabric: Fabric) -> None:
        """Sum over all ranks."""
        for name in ("votes", "probability", "truth", "hits"):
            total = fabric.all_reduce(fabric.to_device(getattr(self, name).float()), reduce_op="sum")
            setattr(self, name, cast(Tensor, total).double().cpu())

    def record(self) -> dict[str, Any]:
        """The patient part of a test record; votes only count patients whose images all have the same label."""
        images = self.truth.sum(1)
        share = self.hits / images
        single = (self.truth > 0).sum(1) == 1
        found: dict[str, Any] = {"patients": len(self.names)}
        found |= {"accuracy": float(share.mean()), "worst": float(share.min())}
        if single.any():
            true = self.truth[single].argmax(1)
            # a tie between classes is broken by the mean probability
            majority = (self.votes[single] + self.probability[single] / (1 + images[single, None])).argmax(1)
            found["one_label"] = {
                "patients": int(single.sum()),
                "majority": float((majority == true).double().mean()),
                "mean_probability": float((self.probability[single].argmax(1) == true).double().mean()),
            }
        return found

"""What is summed up while images are scored, over all devices: probabilities, patients, masks.

Each tally gets its rows with `add`, in any order; then `gather` sums over the processes, and `record` gives the part of
the test record.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from patchgen.runs.tensors import Predictions
from patchgen.tasks.metrics import mask_recovery, probability_scores

MASK_NAMES = ("iou", "kept")


class Tally(Protocol):
    """Receives each row as it is scored."""

    def add(self, rows: np.ndarray, logits: Tensor, label: Tensor) -> None: ...


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

    def gather(self, fabric: Any) -> None:
        """Sum over all ranks: each row was scored by one of them."""
        if fabric.world_size > 1:
            for name in ("probabilities", "label"):
                total = fabric.all_reduce(fabric.to_device(getattr(self, name)), reduce_op="sum")
                setattr(self, name, cast(Tensor, total).cpu())

    def record(self, rows: np.ndarray) -> dict[str, float | None]:
        """`probability_scores` of some of the rows; None if a score is undefined."""
        places = self._places(rows)
        return probability_scores(self.label.numpy()[places].astype(np.int64), self.probabilities.numpy()[places])

    def predictions(self) -> Predictions:
        """All of them, in the order of the table."""
        return Predictions(
            self.rows, self.label.numpy()[self.order].astype(np.int64), self.probabilities.numpy()[self.order]
        )


class PatientTally:
    """Results per patient: every patient counts once, however many images it has.

    Two questions. How accurate are the images of a patient, averaged over patients? And, if all images of a patient
    have the same label, is the patient classified correctly by majority vote, or by the mean probability?

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

    def gather(self, fabric: Any) -> None:
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


class MaskTally:
    """How well the mask before its calibration recovers the predictive patches; `add` in any order, then `record`.

    Calibration changes only the displayed mask, never what the classifier reads, so one pass over the images scores
    both.

    Args:
        truth: (N, P) predictive patches of each row of the table.
    """

    def __init__(self, truth: np.ndarray) -> None:
        self.truth = truth
        self.totals = torch.zeros(len(MASK_NAMES), 2, dtype=torch.float64)  # sum and count of defined values

    def add(self, rows: np.ndarray, mask: Tensor) -> None:
        """Masks (B, P) of some rows, as the classifier uses them."""
        recovery = mask_recovery(mask.float().cpu().numpy(), self.truth[rows])
        values = np.stack([recovery[name] for name in MASK_NAMES])  # (names, B)
        self.totals += torch.from_numpy(np.stack([np.nansum(values, 1), (~np.isnan(values)).sum(1)], 1))

    def gather(self, fabric: Any) -> None:
        """Sum over all ranks."""
        total = fabric.all_reduce(fabric.to_device(self.totals.float()), reduce_op="sum")
        self.totals = cast(Tensor, total).double().cpu()

    def record(self) -> dict[str, float]:
        """The means; names that are undefined for all images are left out."""
        return {
            name: total / count for name, (total, count) in zip(MASK_NAMES, self.totals.tolist(), strict=True) if count
        }

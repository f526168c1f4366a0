"""Scoring: large batches, no gradients, and frozen features are computed only once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.data.images import ImageStore
from patchgen.model.classifier import Classifier, Output
from patchgen.model.device import SingleDevice
from patchgen.model.losses import mask_health
from patchgen.model.selector import Selector
from patchgen.tasks.metrics import mask_recovery, scores

if TYPE_CHECKING:
    from lightning_fabric import Fabric

HEALTH = ("mean", "spread", "weak", "strong")
RECOVERY = ("auroc", "iou", "error", "kept")
UNCALIBRATED = ("iou", "kept")  # recovery by the mask before its calibration, the one that the classifier uses
MEMORY = 2 << 30  # bytes of cached features for a frozen backbone


@dataclass(frozen=True)
class Evaluation:
    """The results of N images: probabilities of C classes, and named values, NaN where one is undefined."""

    label: np.ndarray  # (N,) true class
    probabilities: np.ndarray  # (N, C) float32; C is the side of the confusion matrix
    values: dict[str, np.ndarray]  # (N,) each

    def part(self, images: np.ndarray) -> "Evaluation":
        """The results of some of the images, by position or mask."""
        values = {name: column[images] for name, column in self.values.items()}
        return Evaluation(self.label[images], self.probabilities[images], values)

    @property
    def confusion(self) -> np.ndarray:
        """(C, C) true x predicted."""
        square = np.zeros((self.probabilities.shape[1],) * 2, dtype=np.int64)
        np.add.at(square, (self.label, self.values["predicted"].astype(np.int64)), 1)
        return square

    def mean(self, *names: str) -> dict[str, float]:
        """Means over the images for which a value is defined."""
        columns = {name: self.values[name] for name in names if name in self.values}
        return {n: float(np.nanmean(c, dtype=np.float64)) for n, c in columns.items() if not np.isnan(c).all()}

    @property
    def mask(self) -> dict[str, float]:
        """Mask health, and recovery if the truth is known."""
        return self.mean(*HEALTH, *RECOVERY)

    def means(self) -> dict[str, Any]:
        """The values that are averaged over images rather than counted."""
        return {"loss": 0.0} | self.mean("loss") | ({"mask": self.mask} if self.mask else {})

    def record(self, positive: int | None = None) -> dict[str, Any]:
        """The record of a domain; `positive` is the class for F1."""
        return {**scores(self.confusion, positive), **self.means()}


class Reader:
    """Rows of the table -> input of the classifier, without augmentation; cached if the backbone is frozen."""

    def __init__(
        self, fabric: "SingleDevice | Fabric", model: Classifier, store: ImageStore, tokens: np.ndarray | None = None
    ) -> None:
        self.fabric: Any = fabric
        self.model, self.store = model, store
        self.tokens = tokens  # (N, T, D) of the lower blocks, if only the upper ones are tuned
        self.memory: dict[int, Tensor] = {}  # features by row, while there is
        self.room = MEMORY  # bytes

    @torch.inference_mode(False)  # an evaluation's tensors cannot be trained on
    @torch.no_grad()
    def __call__(self, rows: np.ndarray) -> Tensor:
        if self.tokens is not None:
            return cast(Tensor, self.fabric.to_device(torch.from_numpy(self.tokens[rows]).float()))
        if not self.model.reads_frozen:
            return self.images(rows)
        new = [row for row in np.unique(rows).tolist() if row not in self.memory]
        fresh: dict[int, Tensor] = {}
        if new:
            with self.fabric.autocast():
                fresh = dict(zip(new, self.model.read(self.images(np.array(new))).float().cpu(), strict=True))
        result = torch.stack([fresh[row] if row in fresh else self.memory[row] for row in rows.tolist()])
        if self.room > 0:
            self.memory |= fresh
            self.room -= sum(tensor.nbytes for tensor in fresh.values())
        return self.fabric.to_device(result)

    def images(self, rows: np.ndarray) -> Tensor:
        """Normalised pixels on the device: (B, 3, S, S)."""
        return self.model.backbone.normalised(self.fabric.to_device(self.store.load(rows)))


@dataclass
class Evaluator:
    """Scores rows with the current model."""

    reader: Reader
    label: np.ndarray  # (N,) class id of each row of the table
    num_classes: int  # side of the confusion matrix
    batch: int = 128
    truth: np.ndarray | None = None  # (N, P) predictive patches if known; masks are then scored against them
    mask: str = "learned"  # the one that the model uses: its own, or instead the "true" or a "random" one
    num_known: int | None = None  # classes below this have their own output; the loss is over their images

    @torch.inference_mode()
    def __call__(
        self, rows: np.ndarray, tick: Callable[[int], None] | None = None, mask: str | None = None
    ) -> Evaluation:
        """Score rows; on several devices each scores every n-th row."""
        fabric, model, names = self.reader.fabric, self.reader.model, self._names()
        table = torch.zeros(len(rows), self.num_classes + len(names), device=fabric.device)
        share = slice(fabric.global_rank, None, fabric.world_size)
        model.drop.eval()
        for start in range(0, len(rows[share]), self.batch):
            here = slice(start, start + self.batch)
            part, lines = rows[share][here], table[share][here]
            out = self.outputs(part, self.given_mask(part, mask or self.mask))
            lines[:, : out.logits.shape[1]] = out.logits.float().softmax(1)
            lines[:, self.num_classes :] = torch.stack(self._values(out, part), 1)
            if tick:
                tick(len(part) * fabric.world_size)
        model.drop.train()
        results = cast(Tensor, fabric.all_reduce(table, reduce_op="sum")).cpu().numpy()
        probabilities, values = np.split(results, [self.num_classes], axis=1)
        if not np.isfinite(probabilities).all():
            raise ValueError("training diverged: the classifier's outputs are no longer finite; lower --lr")
        return Evaluation(self.label[rows], probabilities, dict(zip(names, values.T, strict=True)))

    def outputs(self, rows: np.ndarray, mask: Tensor | None = None) -> Output:
        """The model's output for rows, with its own mask or with a given one (B, P)."""
        fabric = self.reader.fabric
        with fabric.autocast():
            return self.reader.model(self.reader(rows), mask=None if mask is None else fabric.to_device(mask))

    def given_mask(self, rows: np.ndarray, kind: str) -> Tensor | None:
        """The mask that replaces the learned one; a random mask has as many patches as the true one."""
        if kind == "learned" or self.truth is None:
            return None
        patches = self.truth[rows]
        if kind == "random":
            patches = np.stack([np.random.default_rng([7, row]).permutation(self.truth[row]) for row in rows.tolist()])
        return self.reader.fabric.to_device(torch.from_numpy(patches).float())

    def _names(self) -> list[str]:
        model, names = self.reader.model, ["predicted", "loss"]
        if model.has_mask:
            names += [*HEALTH, *(RECOVERY if self.truth is not None else ())]
        if isinstance(model.select, Selector) and self.truth is not None:
            names += [f"uncalibrated_{name}" for name in UNCALIBRATED]
        return names

    def _values(self, out: Output, rows: np.ndarray) -> list[Tensor]:
        """One (B,) tensor for each of the names."""
        logits, label = out.logits.float(), self.reader.fabric.to_device(torch.from_numpy(self.label[rows]))
        loss = F.cross_entropy(logits, label.clamp(max=logits.shape[1] - 1), reduction="none")
        values = [logits.argmax(1).float(), loss.masked_fill(label >= (self.num_known or self.num_classes), torch.nan)]
        if out.mask is not None:
            values += mask_health(out.mask).values()
        for mask, names in ((out.mask, RECOVERY), (out.own_mask, UNCALIBRATED)):
            if mask is not None and self.truth is not None:
                recovery = mask_recovery(mask.float().cpu().numpy(), self.truth[rows])
                values += [torch.from_numpy(recovery[name]).to(logits) for name in names]
        return values


def mask_record(evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    """Mask health, averaged over images: {"mask": {"mean": ..., "spread": ..., ...}}."""
    with_mask = [result for result in evaluations.values() if result.mask]
    if not with_mask:
        return {}
    weights = [result.confusion.sum() for result in with_mask]
    names = [n for n in with_mask[0].mask if all(n in result.mask for result in with_mask)]
    return {"mask": {n: float(np.average([r.mask[n] for r in with_mask], weights=weights)) for n in names}}


def patient_scores(names: Sequence[str], label: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
    """The patient part of a test record, from each image's patient, true class (N,) and probabilities (N, C).

    Every patient counts once: the accuracy of its images, and, if these have one label, its majority vote.
    """
    patients, of, images = np.unique(names, return_inverse=True, return_counts=True)
    one_hot, best = np.eye(probabilities.shape[1]), probabilities.argmax(1)

    def by_patient(values: np.ndarray) -> np.ndarray:  # (N, C) -> (patients, C)
        return np.stack([np.bincount(of, column) for column in values.T], 1)

    truth, votes, probability = by_patient(one_hot[label]), by_patient(one_hot[best]), by_patient(probabilities)
    share = np.bincount(of, best == label) / images
    record: dict[str, Any] = {"patients": len(patients), "accuracy": float(share.mean()), "worst": float(share.min())}
    single = (truth > 0).sum(1) == 1
    if single.any():
        true = truth[single].argmax(1)
        majority = votes + probability / (1 + images[:, None])  # ties are broken by the mean probability
        record["one_label"] = {
            "patients": int(single.sum()),
            "majority": float((majority[single].argmax(1) == true).mean()),
            "mean_probability": float((probability[single].argmax(1) == true).mean()),
        }
    return record

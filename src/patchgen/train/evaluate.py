"""Scoring: large batches, no gradients, and frozen features are computed only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.data.augment import normalize
from patchgen.data.images import ImageStore
from patchgen.model.classifier import Classifier, Output
from patchgen.model.device import SingleDevice
from patchgen.model.losses import mask_health
from patchgen.tasks.metrics import mask_recovery, scores

if TYPE_CHECKING:
    from lightning_fabric import Fabric

HEALTH = ("mean", "spread", "weak", "strong")
RECOVERY = ("auroc", "iou", "error", "kept")
UNCALIBRATED = ("iou", "kept")  # recovery by the mask before its calibration, the one that the classifier uses
MEMORY = 2 << 30  # bytes of cached features for a frozen backbone


class ByImage(NamedTuple):
    """Results of single images, in the order of the rows."""

    probabilities: np.ndarray  # (N, C) float32; C is the side of the confusion matrix
    uncalibrated: np.ndarray  # (N, 2) the values of `UNCALIBRATED`; 0 without a calibrated mask or its truth


@dataclass
class Evaluation:
    confusion: np.ndarray  # (C, C) true x predicted
    loss: float  # mean cross-entropy
    mask: dict[str, float] = field(default_factory=dict)  # mask health, and recovery if the truth is known
    images: ByImage | None = None  # if asked for

    def means(self) -> dict[str, Any]:
        """The values that are averaged over images rather than counted."""
        return {"loss": self.loss, **({"mask": self.mask} if self.mask else {})}

    def record(self, positive: int | None = None) -> dict[str, Any]:
        """The record of a domain; `positive` is the class for F1."""
        return {**scores(self.confusion, positive), **self.means()}


class Reader:
    """Rows of the table -> input of the classifier, without augmentation; cached if the backbone is frozen.

    ``tokens`` are the stored ones of the lower blocks (N, T, D), if only the upper ones are tuned.
    """

    def __init__(
        self, fabric: SingleDevice | Fabric, model: Classifier, store: ImageStore, tokens: np.ndarray | None = None
    ) -> None:
        self.fabric: Any = fabric
        self.model, self.store, self.tokens = model, store, tokens
        self.memory: dict[int, Tensor] = {}  # features by row; further ones are not stored
        self.room = MEMORY  # bytes

    @property
    def caches(self) -> bool:
        """Whether pixels are read once: nothing is trained before the stored tokens, or before the head."""
        return self.tokens is not None or self.model.reads_frozen

    @torch.no_grad()
    def __call__(self, rows: np.ndarray) -> Tensor:
        if self.tokens is not None:
            with torch.inference_mode(False):
                return cast(Tensor, self.fabric.to_device(torch.from_numpy(self.tokens[rows]).float()))
        if not self.model.reads_frozen:
            return self.images(rows)
        new = np.array([row for row in np.unique(rows) if int(row) not in self.memory], dtype=np.int64)
        fresh = dict(zip(new.tolist(), self._read(new), strict=True)) if len(new) else {}
        result = torch.stack([fresh[row] if row in fresh else self.memory[row] for row in rows.tolist()])
        for row, tensor in fresh.items():
            if tensor.nbytes <= self.room:
                self.room -= tensor.nbytes
                with torch.inference_mode(False):  # an evaluation's tensors cannot be trained on
                    self.memory[row] = tensor.clone()  # a slice would keep the whole batch alive
        return self.fabric.to_device(result)

    def images(self, rows: np.ndarray) -> Tensor:
        """Normalised pixels on the device: (B, 3, S, S)."""
        backbone = self.model.backbone
        return normalize(self.fabric.to_device(self.store.load(rows)).float() / 255, backbone.mean, backbone.std)

    def _read(self, rows: np.ndarray) -> Tensor:
        with self.fabric.autocast():
            return self.model.read(self.images(rows)).float().cpu()


class Evaluator:
    """Scores rows with the current model.

    Args:
        label: (N,) class id of each row of the table.
        num_classes: Side of the confusion matrix.
        num_known: Classes below this have their own output; images of other classes do not contribute to the loss.
        truth: (N, P) predictive patches if known; masks are then scored against them.
        mask: Which mask the model uses: its "learned" one, or instead the "true" or a "random" one.
    """

    def __init__(
        self,
        reader: Reader,
        label: np.ndarray,
        num_classes: int,
        batch: int = 128,
        truth: np.ndarray | None = None,
        mask: str = "learned",
        num_known: int | None = None,
    ) -> None:
        self.reader, self.label, self.num_classes, self.batch = reader, label, num_classes, batch
        self.truth, self.mask = truth, mask
        self.num_known = num_classes if num_known is None else num_known

    @torch.inference_mode()
    def __call__(
        self,
        rows: np.ndarray,
        tick: Callable[[int], None] | None = None,
        mask: str | None = None,
        by_image: bool = False,
    ) -> Evaluation:
        """Score rows; on several devices each scores every n-th row, and the results are summed."""
        fabric, model = self.reader.fabric, self.reader.model
        confusion = torch.zeros(self.num_classes**2, device=fabric.device)
        totals = torch.zeros(len(self._names()), 2, device=fabric.device)  # sum and count of defined values
        broken = torch.zeros(1, device=fabric.device)
        images = torch.zeros(len(rows), self.num_classes + len(UNCALIBRATED)) if by_image else None
        model.drop.eval()
        mine = np.arange(fabric.global_rank, len(rows), fabric.world_size)
        for start in range(0, len(mine), self.batch):
            place = mine[start : start + self.batch]
            part = rows[place]
            label = fabric.to_device(torch.from_numpy(self.label[part]))
            out = self.outputs(part, self.given_mask(part, mask or self.mask))
            cell = label * self.num_classes + out.logits.argmax(1)
            confusion += torch.bincount(cell, minlength=self.num_classes**2)
            broken += (~out.logits.isfinite()).any()
            values = torch.stack(self._values(out, label, part))  # (names, B)
            totals += torch.stack([values.nansum(1), (~values.isnan()).sum(1)], 1)
            if images is not None:
                images[place, : out.logits.shape[1]] = out.logits.float().softmax(1).cpu()
                if recovery := self._recovery(out.own_mask, part, UNCALIBRATED):
                    images[place, self.num_classes :] = torch.stack(recovery, 1).cpu()
            if tick:
                tick(len(part) * fabric.world_size)
        model.drop.train()
        evaluation = self._collect(confusion, totals, broken)
        if images is not None:  # each was scored by one rank
            if fabric.world_size > 1:
                images = cast(Tensor, fabric.all_reduce(fabric.to_device(images), reduce_op="sum")).cpu()
            evaluation.images = ByImage(*np.split(images.numpy(), [self.num_classes], axis=1))
        return evaluation

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
            shuffled = [np.random.default_rng([7, row]).permutation(self.truth[row]) for row in rows.tolist()]
            patches = np.stack(shuffled)
        return self.reader.fabric.to_device(torch.from_numpy(patches).float())

    def _names(self) -> list[str]:
        if not self.reader.model.has_mask:
            return ["loss"]
        return ["loss", *HEALTH, *(RECOVERY if self.truth is not None else ())]

    def _values(self, out: Output, label: Tensor, rows: np.ndarray) -> list[Tensor]:
        """One (B,) tensor for each of the names."""
        loss = F.cross_entropy(out.logits.float(), label.clamp(max=out.logits.shape[1] - 1), reduction="none")
        values = [loss.masked_fill(label >= self.num_known, torch.nan)]
        if out.mask is not None:
            values += [*mask_health(out.mask).values(), *self._recovery(out.mask, rows, RECOVERY)]
        return values

    def _recovery(self, mask: Tensor | None, rows: np.ndarray, names: Sequence[str]) -> list[Tensor]:
        """One (B,) tensor for each of the names; none without a mask (B, P) or its truth."""
        if mask is None or self.truth is None:
            return []
        recovery = mask_recovery(mask.float().cpu().numpy(), self.truth[rows])
        return [torch.from_numpy(recovery[name]).to(mask.device, torch.float32) for name in names]

    def _collect(self, confusion: Tensor, totals: Tensor, broken: Tensor) -> Evaluation:
        whole = torch.cat([broken, confusion, totals.flatten()])
        whole = cast(Tensor, self.reader.fabric.all_reduce(whole, reduce_op="sum"))
        if whole[0] > 0:
            raise ValueError("training diverged: the classifier's outputs are no longer finite; lower --lr")
        whole = whole[1:]
        square = whole[: len(confusion)].view(self.num_classes, -1).round().long().cpu().numpy()
        means = {
            name: total / count
            for name, (total, count) in zip(self._names(), whole[len(confusion) :].view(-1, 2).tolist(), strict=True)
            if count
        }
        return Evaluation(square, means.pop("loss", 0.0), means)


def mask_record(evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    """Mask health, averaged over images: {"mask": {"mean": ..., "spread": ..., ...}}."""
    with_mask = [result for result in evaluations.values() if result.mask]
    if not with_mask:
        return {}
    weights = [result.confusion.sum() for result in with_mask]
    names = [n for n in with_mask[0].mask if all(n in result.mask for result in with_mask)]
    return {"mask": {n: float(np.average([r.mask[n] for r in with_mask], weights=weights)) for n in names}}


def patient_scores(names: Sequence[str], label: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
    """The patient part of a test record: every patient counts once, however many images it has.

    How accurate are the images of a patient, averaged over patients? And, if all images of a patient have the same
    label, is the patient classified correctly by majority vote, or by the mean probability?

    Args:
        names: Patient of each image.
        label: (N,) true classes.
        probabilities: (N, C).
    """
    patients, of, images = np.unique(names, return_inverse=True, return_counts=True)
    one_hot, best = np.eye(probabilities.shape[1]), probabilities.argmax(1)

    def by_patient(values: np.ndarray) -> np.ndarray:
        """(N, C) -> sums (patients, C)."""
        sums = np.zeros((len(patients), probabilities.shape[1]))
        np.add.at(sums, of, values)
        return sums

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

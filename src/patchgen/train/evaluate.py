"""Scoring: large batches, no gradients, and nothing frozen is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn import functional as F

from patchgen.data.augment import normalize
from patchgen.data.images import ImageStore
from patchgen.model.classifier import Classifier
from patchgen.model.losses import mask_health
from patchgen.train.metrics import scores

MEMORY = 2 << 30  # bytes of features kept for a frozen backbone


@dataclass
class Evaluation:
    confusion: np.ndarray  # (C, C) true x predicted
    loss: float  # mean cross-entropy
    mask: dict[str, float] = field(default_factory=dict)  # mask health, where there is a mask

    def record(self) -> dict[str, float]:
        return scores(self.confusion, self.loss)


class Reader:
    """Rows of the table -> what the classifier reads, un-augmented; kept in memory where the backbone is frozen."""

    def __init__(self, fabric: Fabric, model: Classifier, store: ImageStore) -> None:
        self.fabric, self.model, self.store = fabric, model, store
        self.memory: dict[int, Tensor] = {}
        self.room = MEMORY if model.backbone.frozen else 0

    @torch.no_grad()
    def __call__(self, rows: np.ndarray) -> Tensor:
        if not self.model.backbone.frozen:
            return self.images(rows)
        new = np.array([row for row in np.unique(rows) if int(row) not in self.memory], dtype=np.int64)
        fresh = dict(zip(new.tolist(), self._read(new), strict=True)) if len(new) else {}
        result = torch.stack([fresh[row] if row in fresh else self.memory[row] for row in rows.tolist()])
        self._remember(fresh)
        return self.fabric.to_device(result)

    def images(self, rows: np.ndarray) -> Tensor:
        """Normalised pixels on the device: (B, 3, S, S)."""
        backbone = self.model.backbone
        return normalize(self.fabric.to_device(self.store.load(rows)).float() / 255, backbone.mean, backbone.std)

    def _read(self, rows: np.ndarray) -> Tensor:
        with self.fabric.autocast():
            return self.model.read(self.images(rows)).float().cpu()

    def _remember(self, fresh: dict[int, Tensor]) -> None:
        for row, tensor in fresh.items():
            size = tensor.numel() * tensor.element_size()
            if size <= self.room:
                self.room -= size
                self.memory[row] = tensor.clone()


class Evaluator:
    def __init__(self, reader: Reader, label: np.ndarray, num_classes: int, batch: int = 128) -> None:
        self.reader, self.label, self.num_classes, self.batch = reader, label, num_classes, batch

    @torch.no_grad()
    def __call__(self, rows: np.ndarray, tick: Callable[[int], None] | None = None) -> Evaluation:
        """Score rows with the model as it is; several devices take every n-th row and add up."""
        fabric, model = self.reader.fabric, self.reader.model
        confusion = torch.zeros(self.num_classes**2, device=fabric.device)
        totals: dict[str, Tensor] = {"loss": torch.zeros((), device=fabric.device)}
        mine = rows[fabric.global_rank :: fabric.world_size]
        for start in range(0, len(mine), self.batch):
            part = mine[start : start + self.batch]
            label = fabric.to_device(torch.from_numpy(self.label[part]))
            with fabric.autocast():
                out = model(self.reader(part))
            cell = label * self.num_classes + out.logits.argmax(1)
            confusion += torch.bincount(cell, minlength=self.num_classes**2)
            totals["loss"] += F.cross_entropy(out.logits.float(), label, reduction="sum")
            for name, value in mask_health(out.mask).items() if out.mask is not None else ():
                totals[name] = totals.get(name, torch.zeros((), device=fabric.device)) + value.sum()
            if tick:
                tick(len(part) * fabric.world_size)
        return self._collect(confusion, totals, len(rows))

    def _collect(self, confusion: Tensor, totals: dict[str, Tensor], count: int) -> Evaluation:
        fabric = self.reader.fabric
        names = ["loss", "mean", "spread", "weak", "strong"] if self.reader.model.pool == "patchgen" else ["loss"]
        sums = torch.stack([totals.get(name, torch.zeros((), device=fabric.device)) for name in names])
        whole = cast(Tensor, fabric.all_reduce(torch.cat([confusion, sums]), reduce_op="sum")).cpu().numpy()
        mean = dict(zip(names, (whole[len(confusion) :] / max(count, 1)).tolist(), strict=True))
        square = whole[: len(confusion)].reshape(self.num_classes, self.num_classes).round().astype(np.int64)
        return Evaluation(square, mean.pop("loss"), mean)

"""Contrastive losses between views and between classes, and the projection head that they act on.

    projected = head(features)                                   # (2B, E), unit vectors; view 1 of all, then view 2
    info_nce(projected) + supervised_contrastive(projected, label)

All images of a batch are compared with each other, so these losses need the whole batch on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

START = 0.9  # initial standard deviation of a layer times the square root of its inputs: DINO's 0.02 at 2048


def info_nce(projected: Tensor, temperature: float = 1.0) -> Tensor:
    """Identify the other view of the same image among all others: cross-entropy over 2B - 1 candidates.

    Args:
        projected: (2B, E) unit vectors, the first views of all images and then the second.
    """
    count = len(projected) // 2
    if len(projected) != 2 * count or count < 1:
        raise ValueError(f"two views of each image are needed, so an even number of rows; got {len(projected)}")
    similarity = _without_self(projected @ projected.T / temperature)
    other = torch.arange(2 * count, device=projected.device).roll(count)  # the other view's row
    return F.cross_entropy(similarity, other)


def supervised_contrastive(projected: Tensor, label: Tensor, temperature: float = 0.07) -> Tensor:
    """Identify all views of the same class (Khosla et al. 2020): mean of -log p over the positives of a labelled view.

    Args:
        projected: (N, E) unit vectors.
        label: (N,) class ids; rows with -1 are ignored. Without labels, a differentiable 0.
    """
    labelled = label >= 0
    similarity = _without_self(projected @ projected.T / temperature)
    log_p = similarity.masked_fill(~labelled, torch.finfo(similarity.dtype).min).log_softmax(1)  # their columns
    positive = ((label[:, None] == label) & labelled).fill_diagonal_(False)
    number = positive.sum(1)
    found = torch.where(positive, log_p, 0).sum(1) / number.clamp(min=1)  # (N,)
    return -found.sum() / (number > 0).sum().clamp(min=1)


def _without_self(similarity: Tensor) -> Tensor:
    """-inf on the diagonal: no row is compared with itself."""
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(itself, -torch.inf)


class ProjectionHead(nn.Module):
    """Features (B, D) -> unit vectors (B, out): two hidden layers, a unit bottleneck, a layer of unit rows.

    The shape is that of DINO's head, which GCD and PromptCCD use; with `out` 0 it ends with the bottleneck, as SimGCD's
    projector does. It is discarded after training. Its initialisation is scaled to the widths: with 0.02 for all, a
    narrow head starts with outputs so short that the first gradients, which are divided by their length, are large
    (measured: docs/results/ccd-small.md).
    """

    def __init__(self, dim: int, hidden: int, bottleneck: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.directions = nn.Parameter(torch.empty(out, bottleneck)) if out else None
        if self.directions is not None:
            nn.init.trunc_normal_(self.directions, std=0.02)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=START / layer.in_features**0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        narrow = F.normalize(self.layers(features), dim=1)
        if self.directions is None:
            return narrow
        return F.normalize(narrow @ F.normalize(self.directions, dim=1).T, dim=1)

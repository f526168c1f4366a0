"""Group a batch by source domain, for the methods that compare domains."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from patchgen.data.loaders import Batch
from patchgen.model.losses import cross_entropy


def by_domain(batch: Batch, device: torch.device | str | None = None) -> list[Tensor]:
    """Positions of each source domain's samples in the batch, in the order of the domains' ids.

    Every part of a step's batch has the same share of each domain, so the list has the same length on every device. If
    the batch records its layout, no device synchronisation is needed.

    Args:
        device: Device of the positions; by default that of the batch.
    """
    device = device or batch.domain.device
    if batch.num_domains is not None:
        return list(torch.arange(len(batch.domain), device=device).view(batch.num_domains, -1))
    ids = batch.domain.to(device)
    return [torch.nonzero(ids == domain).squeeze(1) for domain in torch.unique(ids)]


def domain_risks(logits: Tensor, batch: Batch) -> Tensor:
    """L_e: (K,) cross-entropy of each source domain's labelled samples; 0 if it has none."""
    return torch.stack([cross_entropy(logits[rows], batch.label[rows]) for rows in by_domain(batch)])


def mean_over_pairs(distance: Callable[[Tensor, Tensor], Tensor], groups: list[Tensor]) -> Tensor:
    """Mean of a distance over the pairs of domains; 0 if there is only one."""
    pairs = list(itertools.combinations(groups, 2))
    if not pairs:
        return groups[0].sum() * 0
    return torch.stack([distance(one, other) for one, other in pairs]).mean()

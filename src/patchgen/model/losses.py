"""Cross-entropy and the three losses of PatchGen, each a mean over the global batch.

Targets are class ids; samples with -1 (no label and no pseudo-label) are ignored. If no samples remain, the loss is a
differentiable zero. On several devices, sums and counts are reduced with gradients: with DDP's averaging of gradients
they equal one device with the whole batch.
"""

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F


def mask_suppression(mask: Tensor, tau: float = 0.25) -> Tensor:
    """L_ms (Eq. 4): the mean of the weak entries of a mask (B, P) in (0, 1), those below ``tau``.

    It pushes weak entries towards zero and leaves the others unchanged, so no fixed share of patches is imposed.

    >>> mask_suppression(torch.tensor([[0.1, 0.2, 0.9]]))
    tensor(0.1500)
    """
    weak = mask < tau
    return mean_over_ranks(torch.where(weak, mask, 0).sum(), weak.sum())


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of -log p(y | z) for logits (B, C) and targets (B,), with optional weights (B,) of the samples."""
    if weight is None:
        total = F.cross_entropy(logits.float(), target, ignore_index=-1, reduction="sum")
    else:
        total = (weight * F.cross_entropy(logits.float(), target, ignore_index=-1, reduction="none")).sum()
    return mean_over_ranks(total, (target >= 0).sum())


def generalized_cross_entropy(logits: Tensor, target: Tensor, q: float) -> Tensor:
    """Mean of (1 - p_y^q) / q (Zhang & Sabuncu 2018): cross-entropy for q -> 0, 1 - p_y for q = 1."""
    labelled = target >= 0
    loss = (1 - _probability(logits, target).clamp(min=1e-6) ** q) / q
    return mean_over_ranks((loss * labelled).sum(), labelled.sum())


def pseudo_labels(logits: Tensor, target: Tensor) -> Tensor:
    """The targets, with missing ones (-1) replaced by the arg-max of the detached logits."""
    return torch.where(target >= 0, target, logits.detach().argmax(1))


def selected_confidence(logits: Tensor, target: Tensor) -> Tensor:
    """L_conf (Eq. 5): minus the mean probability of the target class; logits (B, C) of z+, targets (B,)."""
    return -label_probability(logits, target)


def label_probability(logits: Tensor, target: Tensor) -> Tensor:
    """Mean of p(y | z)."""
    labelled = target >= 0
    return mean_over_ranks((_probability(logits, target) * labelled).sum(), labelled.sum())


def _probability(logits: Tensor, target: Tensor) -> Tensor:
    """p(y | z) of each sample (B,); that of class 0 where it has no label."""
    return logits.float().softmax(-1).gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)


def class_similarity(features: Tensor, target: Tensor, num_classes: int | None = None) -> Tensor:
    """L_sim: one minus the mean cosine similarity of all pairs within a class, averaged over the classes present.

    The mean over pairs of z+ (B, D), self-pairs included, is the squared length of the mean unit vector: the cost is
    O(B D), and a single sample contributes zero. Without `num_classes` a GPU synchronises to inspect the targets (B,).
    """
    if num_classes is None:
        num_classes = int(gather_over_ranks(F.pad(target, (0, 1), value=-1)).max()) + 1
    labelled = (target >= 0).float()  # (B,)
    slot = target.clamp(min=0)
    unit = F.normalize(features.float(), dim=-1) * labelled.unsqueeze(1)  # (B, D)
    sums = sum_over_ranks(unit.new_zeros(max(num_classes, 1), unit.shape[1]).index_add(0, slot, unit))  # (C, D)
    counts = sum_over_ranks(labelled.new_zeros(max(num_classes, 1)).index_add(0, slot, labelled))  # (C,)
    spread = 1 - (sums / counts.clamp(min=1).unsqueeze(1)).square().sum(1)  # (C,)
    present = counts > 0
    return torch.where(present, spread, 0).sum() / present.sum().clamp(min=1)


def mask_health(mask: Tensor) -> dict[str, Tensor]:
    """Statistics of a mask, one value per image (B,): a healthy mask is neither all 0, nor all 1, nor uniform."""
    mask = mask.float()
    return {
        "mean": mask.mean(1),
        "spread": mask.std(1, correction=0),
        "weak": (mask < 0.25).float().mean(1),
        "strong": (mask > 0.75).float().mean(1),
    }


# Reductions over the global batch of several devices, with gradient; on a single device they do nothing.


def mean_over_ranks(total: Tensor, count: Tensor) -> Tensor:
    """The mean over all ranks from each rank's sum and count; 0 if the count is 0."""
    return sum_over_ranks(total) / sum_over_ranks(count.to(total.dtype)).clamp(min=1)


def sum_over_ranks(value: Tensor) -> Tensor:
    if not _many_ranks():
        return value
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(value)


def gather_over_ranks(value: Tensor) -> Tensor:
    """(B, ...) of each of W ranks -> (W * B, ...) on all of them; every rank has the same B."""
    if not _many_ranks():
        return value
    parts = [value if rank == dist.get_rank() else torch.zeros_like(value) for rank in range(dist.get_world_size())]
    return sum_over_ranks(torch.cat(parts))


def _many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

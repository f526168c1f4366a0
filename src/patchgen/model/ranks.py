"""Reductions over the global batch of several devices, for losses that are not a plain mean over local samples.

A rank that needs the samples of the others gets them through a sum with gradient; together with the averaging of
gradients, that equals one device with the whole batch. On a single device these functions do nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def mean_over_ranks(total: Tensor, count: Tensor) -> Tensor:
    """The mean over all ranks from each rank's sum and count, with gradient; 0 if the count is 0."""
    return sum_over_ranks(total) / sum_over_ranks(count.to(total.dtype)).clamp(min=1)


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum over all ranks, with gradient: together with DDP's averaging it equals a single device."""
    if not _many_ranks():
        return value
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(value)


def max_over_ranks(target: Tensor) -> int:
    """The largest id on any rank; -1 if there is none."""
    largest = target.max() if target.numel() else target.new_tensor(-1)
    if _many_ranks():
        largest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def gather_over_ranks(value: Tensor) -> Tensor:
    """(B, ...) of each of W ranks -> (W * B, ...) on all of them, with gradient; every rank has the same B."""
    if not _many_ranks():
        return value
    own, empty = dist.get_rank(), torch.zeros_like(value)
    parts = [value if rank == own else empty for rank in range(dist.get_world_size())]
    return sum_over_ranks(torch.cat(parts))


def _many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

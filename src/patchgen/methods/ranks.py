"""The global batch of several devices, for terms that are no plain mean over samples.

A rank that needs the samples of the others sees them through a sum with gradient; together with the averaging of
gradients that equals one big device. On one device nothing happens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from patchgen.model.losses import _many_ranks, _mean_over_ranks, _sum_over_ranks

sum_over_ranks = _sum_over_ranks
mean_over_ranks = _mean_over_ranks


def gather_over_ranks(value: Tensor) -> Tensor:
    """(B, ...) of each of W ranks -> (W * B, ...) on all of them, with gradient; every rank has the same B."""
    if not _many_ranks():
        return value
    own, empty = dist.get_rank(), torch.zeros_like(value)
    parts = [value if rank == own else empty for rank in range(dist.get_world_size())]
    return sum_over_ranks(torch.cat(parts))


__all__ = ["gather_over_ranks", "mean_over_ranks", "sum_over_ranks"]

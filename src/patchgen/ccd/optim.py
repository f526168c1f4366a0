"""SGD for a stream: restarted in each stage, separate rates for the PatchGen module and the rest, a cosine schedule.

As in the releases, PromptCCD and GCD apply weight decay to all trained tensors; SimGCD exempts biases and norms.
"""

from __future__ import annotations

import math

import torch

from patchgen.ccd.model import StreamModel
from patchgen.ccd.settings import StreamConfig

LOWEST = 1e-3  # final learning rate of the cosine, relative to the initial one


def make_stream_optimizer(model: StreamModel, config: StreamConfig, decays_vectors: bool = True) -> torch.optim.SGD:
    """The optimiser of a stage.

    Args:
        decays_vectors: Whether weight decay also applies to one-dimensional tensors.
    """
    module = config.lr if config.lr_module is None else config.lr_module
    chosen = {id(p) for p in model.select.parameters()} if model.select is not None else set()
    groups = []
    for inside, rate in ((False, config.lr), (True, module)):
        found = [p for p in model.parameters() if p.requires_grad and (id(p) in chosen) == inside]
        spared = [p for p in found if p.ndim == 1 and not decays_vectors]
        decayed = [p for p in found if p.ndim > 1 or decays_vectors]
        for params, decay in ((decayed, config.weight_decay), (spared, 0.0)):
            if params:
                groups.append({"params": params, "lr": rate, "peak": rate, "weight_decay": decay})
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def set_rate(optimizer: torch.optim.SGD, epoch: int, epochs: int) -> float:
    """Set the rates of an epoch, from the full rate to a thousandth; returns that of the first group."""
    share = LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * epoch / epochs)) / 2
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return float(optimizer.param_groups[0]["lr"])

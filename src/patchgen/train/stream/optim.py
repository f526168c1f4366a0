"""SGD for a stream: fresh in each stage, one rate for the PatchGen module and one for the rest, a cosine over time.

PromptCCD and GCD decay all that learns; SimGCD spares biases and norms, as the releases do.
"""

from __future__ import annotations

import math

import torch

from patchgen.config.stream import StreamConfig
from patchgen.methods.stream.model import StreamModel

LOWEST = 1e-3  # of the learning rate, at the end of the cosine


def make_stream_optimizer(model: StreamModel, config: StreamConfig, decays_vectors: bool = True) -> torch.optim.SGD:
    """The optimiser of a stage.

    Args:
        decays_vectors: Whether weight decay acts on tensors of one dimension too.
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
    """Give an epoch its rates, from the whole to a thousandth; returns that of the first group."""
    share = LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * epoch / epochs)) / 2
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return float(optimizer.param_groups[0]["lr"])

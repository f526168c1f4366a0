"""Separate learning rates for the head, the module, the tuned part of the backbone and a method's modules.

The optimiser (Adam, AdamW or SGD) and the schedule are the method's, unless the settings name others.
"""

from __future__ import annotations

import math

import torch

from patchgen.config import Config
from patchgen.methods import Method
from patchgen.model.classifier import Classifier


def make_optimizer(model: Classifier, config: Config, method: Method | None = None) -> torch.optim.Optimizer:
    rates = {
        "head": config.lr,
        "select": config.lr if config.lr_module is None else config.lr_module,
        "backbone": config.lr if config.lr_backbone is None else config.lr_backbone,
    }
    groups = []
    own = [(f"method {i}", module, rate) for i, (module, rate) in enumerate(method.rates())] if method else []
    for part, module, rate in [*((part, getattr(model, part), rate) for part, rate in rates.items()), *own]:
        params = [] if module is None else [p for p in module.parameters() if p.requires_grad]
        if params:
            groups.append({"params": params, "lr": rate, "peak": rate, "name": part})
    groups = groups or [{"params": []}]  # for methods that train nothing
    kind = config.optimizer or (method or Method).optimizer
    if kind == "sgd":
        momentum = (method or Method).momentum
        return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, weight_decay=config.weight_decay)
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return make(groups, weight_decay=config.weight_decay)


def set_rates(optimizer: torch.optim.Optimizer, method: Method, number: int) -> None:
    """Set the learning rates of a step: a linear warm-up to the full rate, then constant or a cosine.

    The cosine would reach 0 after the last step.
    """
    config = method.config
    cosine, after = (config.lr_schedule or method.lr_schedule) == "cosine", number - config.warmup
    if after < 0:
        share = (number + 1) / (config.warmup + 1)
    else:
        share = (1 + math.cos(math.pi * after / (config.steps - config.warmup))) / 2 if cosine else 1.0
    if cosine or config.warmup:
        for group in optimizer.param_groups:
            group["lr"] = group.get("peak", 0.0) * share

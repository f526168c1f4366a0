"""Separate learning rates for the head, the module, the tuned part of the backbone and a method's modules.

The optimiser (Adam, AdamW or SGD) and the schedule are the method's, unless the settings name others.
"""

import math

import torch

from patchgen.methods import Method
from patchgen.model.classifier import Classifier


def make_optimizer(model: Classifier, method: Method) -> torch.optim.Optimizer:
    config = method.config
    parts = [
        ("head", model.head, None),
        ("select", model.select, config.lr_module),
        ("backbone", model.backbone, config.lr_backbone),
        *((f"method {i}", module, rate) for i, (module, rate) in enumerate(method.rates())),
    ]
    groups = []
    for part, module, own in parts:
        params = [] if module is None else [p for p in module.parameters() if p.requires_grad]
        if params:
            rate = config.lr if own is None else own
            groups.append({"params": params, "lr": rate, "peak": rate, "name": part})
    groups = groups or [{"params": []}]  # for methods that train nothing
    kind = config.optimizer or method.optimizer
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=method.momentum, weight_decay=config.weight_decay)
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

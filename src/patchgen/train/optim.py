"""Adam with one learning rate each for the head, the module, the tuned part of the backbone and a method's parts."""

from __future__ import annotations

import torch

from patchgen.config import Config
from patchgen.methods import Method
from patchgen.model.classifier import Classifier


def make_optimizer(model: Classifier, config: Config, method: Method | None = None) -> torch.optim.Adam:
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
            groups.append({"params": params, "lr": rate, "name": part})
    # a method that trains nothing has an optimiser of nothing
    return torch.optim.Adam(groups or [{"params": []}], weight_decay=config.weight_decay)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's memory as flat tensors: ``<parameter number>.<what>``."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{what}": tensor for number, slots in state.items() for what, tensor in slots.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        number, what = name.split(".", 1)
        state.setdefault(int(number), {})[what] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

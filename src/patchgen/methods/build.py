"""From settings to a model, and from a model to the tensors that training changed, all that a checkpoint contains."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchgen.config import Config
from patchgen.methods import Method
from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.classifier import Classifier, trained_tensors
from patchgen.model.preprocessing import IMAGENET
from patchgen.model.tuning import set_tuning


def build_model(
    config: Config,
    method: Method,
    num_classes: int,
    progress: Callable[[str], None] | None = None,
    recorded: Mapping[str, Any] | None = None,  # the run's record of its backbone, if it is resumed or used
) -> Classifier:
    """The untrained classifier of a run; its weights depend on the seed alone, not on the random state."""
    backbone = load_backbone(config.backbone, image_size=config.image_size, progress=progress, recorded=recorded)
    return build_on(backbone, config, method, num_classes)


def build_on(backbone: Backbone, config: Config, method: Method, num_classes: int) -> Classifier:
    """The same with a backbone that is already loaded."""
    if config.normalization == "imagenet":
        backbone.expect(IMAGENET)  # the pixels of the published protocols, whatever it was trained with
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        set_tuning(backbone, method.chosen_tune, config.lora_rank)
        model = Classifier(
            backbone,
            num_classes,
            image_size=config.image_size,
            pool=method.chosen_pool,
            refine=config.refine,
            attend=method.attend,
            start=method.start,
            rho_start=config.rho_start,
            spread=config.spread,
            dropout=config.dropout,
        )
        method.extend(model)
    return model


def recompute_activations(backbone: Backbone, method: str, selects_inside: bool = False) -> None:
    """Activation checkpointing: each block is recomputed in the backward pass. Call it after ``Method.setup``."""
    if backbone.family.convolutional:
        raise ValueError(
            f"checkpoint_activations needs a backbone of transformer blocks, and {backbone.source!r} is a "
            f"{backbone.model_type}; leave it out, or give --micro-batch to save memory"
        )
    if selects_inside or any(part._forward_hooks or part._forward_pre_hooks for part in backbone.model.modules()):
        raise ValueError(
            f"checkpoint_activations runs each block twice, and method {method!r} reads or changes activations inside "
            "the backbone; leave it out. --micro-batch, --precision bf16-mixed or a smaller --batch-per-domain help too"
        )
    for block in backbone.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@torch.no_grad()
def load_trained(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load trained tensors into the model; every name and shape must match."""
    own = trained_tensors(model)
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise ValueError(f"the checkpoint does not fit this model: {len(odd)} tensors differ, such as {odd[0]!r}")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(f"{name}: the checkpoint has {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(tensors[name])


def describe(model: Classifier, classes: tuple[str, ...]) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    backbone = model.backbone.record()
    return {"classes": list(classes), "pool": model.pool, "grid": list(model.grid), "backbone": backbone}


def check_origin(file: Path, facts: dict[str, Any], about: dict[str, Any]) -> None:
    """Check that the backbone, pool and grid are those that the tensors were trained with."""
    pairs = {name: (facts.get(name), about[name]) for name in ("pool", "grid")}
    pairs["backbone"] = facts.get("backbone", {}).get("digest"), about["backbone"]["digest"]
    for name, (was, now) in pairs.items():
        if was != now:
            raise ValueError(
                f"{file} was trained with {name} {was!s:.20}, but config.yaml now gives {now!s:.20}; restore its "
                "settings (backbone, method, pool, image_size)"
            )

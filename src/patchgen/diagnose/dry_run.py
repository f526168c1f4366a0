"""What `patchgen train --dry-run` says: time on this machine, arithmetic, and memory of a step."""

from __future__ import annotations

from typing import Any

import torch

from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.diagnose.cost import count_flops, make_rival, random_batch, step_peak
from patchgen.fit.budget import measure, training_seconds
from patchgen.methods.build import recompute_activations
from patchgen.model.backbone import load_architecture
from patchgen.tasks import make_fold

SIZES = 3, 6  # images of the steps whose memory is counted: it grows by the same number of bytes with each image
SHARED = ("pool", "tune", "hparams", "lora_rank", "optimizer")  # settings that arithmetic and memory depend on


def measured_costs(config: Config) -> dict[str, Any]:
    """Cost of a run: a few timed steps and forward passes, and counted bytes and operations of a step in float32."""
    fold = make_fold(config)
    rate = measure(config, fold.classes)
    backbone = load_architecture(config.backbone, config.image_size)
    settings = {name: getattr(config, name) for name in SHARED}
    rival = make_rival(config.method, backbone, config.image_size, **settings)
    if config.checkpoint_activations:
        recompute_activations(backbone, config.method)
    flops = count_flops(rival, random_batch(SIZES[1], config.image_size)) / SIZES[1]
    rival.step(random_batch(SIZES[0], config.image_size))  # the optimiser's state is allocated by the first step
    small, large = (step_peak(rival, random_batch(size, config.image_size)) for size in SIZES)
    per_image = (large - small) / (SIZES[1] - SIZES[0])
    images = config.batch_per_domain * len(fold.train) // config.devices
    images = min(images, config.images_at_once(images) or images)
    weights = sum(p.numel() * p.element_size() for p in rival.model.parameters())
    total = weights + large + per_image * (images - SIZES[1])
    return {
        "images_per_step": config.batch_per_domain * len(fold.train),
        "steps": config.steps,
        "seconds": training_seconds(config, fold, rate),
        "seconds_per_image": rate.step,
        "gflops_per_image": flops / 1e9,
        "bytes_per_image": per_image,
        "bytes": total,
        "card_bytes": torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None,
    }


def cost_lines(cost: dict[str, Any]) -> list[str]:
    """The costs in words, with a warning if the card is smaller than a step."""
    images, steps = cost["images_per_step"], cost["steps"]
    lines = [
        f"{steps} steps of {images} images",
        f"time: about {duration(cost['seconds'])} on this machine, {cost['seconds_per_image']:.3f} s per image "
        "(measured on a few steps, with evaluations)",
        f"arithmetic: {cost['gflops_per_image']:.1f} GFLOPs per training image, "
        f"{cost['gflops_per_image'] * images * steps / 1e6:.3g} PFLOPs in all steps",
        f"memory: {cost['bytes'] / 1e9:.2f} GB for a step in float32, {cost['bytes_per_image'] / 1e6:.1f} MB per image",
    ]
    card = cost["card_bytes"]
    if card is not None and card < cost["bytes"]:
        lines.append(
            f"WARNING: this card has {card / 1e9:.1f} GB, less than a step needs: add --precision bf16-mixed or "
            "--checkpoint-activations, or lower --batch-per-domain"
        )
    return lines

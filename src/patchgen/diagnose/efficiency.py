"""Part E: what PatchGen adds to the matched LP+LN on a run's backbone and image size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.diagnose import cost
from patchgen.methods import make_method
from patchgen.model.backbone import BACKBONES, Backbone, load_backbone, set_tuning
from patchgen.model.classifier import Classifier
from patchgen.train.optim import make_optimizer

PATCHES = (64, 256)  # of the module's own memory comparison, which `patchgen bench step` does in full
CLASSES = 7


def efficiency(
    config: Config, *, batch: int = 4, repeats: int = 5, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """`cost.measure_step` on the run's backbone, and the peak bytes of a whole training step of both methods."""
    found = cost.measure_step(
        config.backbone, image_size=config.image_size, batch=batch, repeats=repeats, patches=PATCHES, report=report
    )
    named = config.backbone == "auto" or config.backbone in BACKBONES
    backbone = load_backbone(config.backbone, pretrained=not named)
    peaks = {name: step_peak(name, backbone, config.image_size, batch) for name in (cost.BASELINE, cost.MEASURED)}
    for name, peak in peaks.items():
        found["methods"][name]["peak_bytes"] = peak
    found["ratio"]["peak_bytes"] = peaks[cost.MEASURED] / peaks[cost.BASELINE]
    return found


def step_peak(name: str, backbone: Backbone, image_size: int, batch: int) -> int:
    """Most bytes alive at once in a method's training step, beyond its weights and its images."""
    config = Config(data="random", unseen="none", method=name, image_size=image_size)
    method = make_method(config)
    set_tuning(backbone, method.chosen_tune)
    model = Classifier(backbone, CLASSES, image_size=image_size, pool=method.chosen_pool)
    rival = cost.Rival(method, model, make_optimizer(model, config))
    index = torch.arange(batch)
    images = torch.randn(batch, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    with cost.PeakMemory([images, *model.parameters(), *model.buffers()]) as memory:
        rival.step(Batch(images, index % CLASSES, torch.zeros_like(index), index))
    return memory.peak

"""A quick estimate in seconds: a linear probe on frozen features, scored at each left-out site.

    look = quick_look(config, table, sites, store)
    print(look)             # quick look ...: accuracy 0.78 at a left-out site (berlin 0.81, lyon 0.74, ...)

The features of all sites are computed once, whichever site is left out. The results of the trainings replace this
estimate. The measured time of a forward pass also gives an estimate of the cost of all trainings.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.data.augment import normalize
from patchgen.data.images import ImageStore
from patchgen.data.table import Table
from patchgen.model.backbone import IMAGENET, load_backbone
from patchgen.tasks.mdg import at_most

IMAGES = 800  # at most, over all sites
BATCH = 32


@dataclass(frozen=True)
class QuickLook:
    """Accuracy at each left-out site, of a linear probe on frozen features."""

    accuracy: dict[str, float]
    images: int  # that were read
    of: int  # labelled images there are
    seconds: float
    per_image: float  # seconds of a forward pass

    def __str__(self) -> str:
        sites = ", ".join(f"{site} {value:.2f}" for site, value in self.accuracy.items())
        mean = sum(self.accuracy.values()) / len(self.accuracy)
        return (
            f"quick look (linear probe on frozen features, {self.images:,} of {self.of:,} images, "
            f"{duration(self.seconds)}): accuracy {mean:.2f} at a left-out site ({sites})"
        )


def quick_look(
    config: Config, table: Table, left_out: Sequence[str], store: ImageStore, tick: Callable[[int], None] | None = None
) -> QuickLook:
    """Leave each of the sites out with a linear probe on the backbone's frozen features."""
    start = time.monotonic()
    labelled = np.flatnonzero(table.label >= 0)
    share = IMAGES // len(table.domains)
    rows = np.concatenate(
        [at_most(labelled[table.domain[labelled] == d], share, [config.seed, 31, d]) for d in range(len(table.domains))]
    )
    features, per_image = _features(config, store, rows, tick)
    label, domain = table.label[rows], table.domain[rows]
    accuracy = {site: _probe(features, label, domain == table.domains.index(site)) for site in left_out}
    return QuickLook(accuracy, len(rows), len(labelled), time.monotonic() - start, per_image)


@torch.inference_mode()
def _features(
    config: Config, store: ImageStore, rows: np.ndarray, tick: Callable[[int], None] | None
) -> tuple[np.ndarray, float]:
    """Class tokens (N, D), and the seconds of a forward pass for each image."""
    from lightning_fabric import Fabric

    device = Fabric(accelerator=config.accelerator, devices=1).device
    backbone = load_backbone(config.backbone, image_size=config.image_size).to(device)
    mean, std = IMAGENET if config.normalization == "imagenet" else (backbone.mean, backbone.std)
    found, seconds = [], []
    for first in range(0, len(rows), BATCH):
        pixels = store.load(rows[first : first + BATCH]).to(device).float() / 255
        begun = time.monotonic()
        found.append(backbone(normalize(pixels, mean, std)).cls.float().cpu().numpy())
        seconds.append((time.monotonic() - begun) / len(pixels))
        if tick:
            tick(len(pixels))
    return np.concatenate(found), float(np.median(seconds))


def _probe(features: np.ndarray, label: np.ndarray, out: np.ndarray) -> float:
    """Accuracy on the rows that are `out` (N,) of logistic regression on the others."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(label[~out])) < 2:  # only one class: nothing to learn
        return float((label[out] == label[~out][0]).mean())
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged: still useful as an estimate
        return float(probe.fit(features[~out], label[~out]).score(features[out], label[out]))

"""The model of a stream method: a backbone with optional prompts, one vector per image, and a projection head.

seen = model.read(images, prompts)      # seen.features (B, D): CLS, the mean token, or z+ of PatchGen
model.project(seen.features)            # (B, E), unit vectors, only for the contrastive losses
model.classify(seen.features, 80)       # (B, 80) cosines with the first 80 learned prototypes (SimGCD)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.ccd.prompts import prompted
from patchgen.ccd.settings import StreamConfig
from patchgen.model.backbone import Backbone, Tokens, load_backbone
from patchgen.model.classifier import Output
from patchgen.model.patchgen import PatchGen
from patchgen.model.selector import Selector
from patchgen.model.tuning import set_tuning

START = 0.9  # initial standard deviation of a layer times the square root of its inputs: DINO's 0.02 at 2048


class ProjectionHead(nn.Module):
    """Features (B, D) -> unit vectors (B, out): two hidden layers, a unit bottleneck, a layer of unit rows.

    The shape is that of DINO's head, which GCD and PromptCCD use; with `out` 0 it ends with the bottleneck, as SimGCD's
    projector does. It is discarded after training. Its initialisation is scaled to the widths: with 0.02 for all, a
    narrow head starts with outputs so short that the first gradients, which are divided by their length, are large
    (measured: docs/results/ccd-small.md).
    """

    def __init__(self, dim: int, hidden: int, bottleneck: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.directions = nn.Parameter(torch.empty(out, bottleneck)) if out else None
        if self.directions is not None:
            nn.init.trunc_normal_(self.directions, std=0.02)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=START / layer.in_features**0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        narrow = F.normalize(self.layers(features), dim=1)
        if self.directions is None:
            return narrow
        return F.normalize(narrow @ F.normalize(self.directions, dim=1).T, dim=1)


class StreamModel(nn.Module):
    """A backbone, a pool (`cls`, `mean`, `patchgen`, `select`), a projection head and, optionally, prototypes."""

    def __init__(self, backbone: Backbone, config: StreamConfig, pool: str, prototypes: int = 0) -> None:
        super().__init__()
        self.backbone, self.pool = backbone, pool
        self.grid = backbone.grid(config.image_size)
        self.select: PatchGen | Selector | None = None
        if pool == "patchgen":
            self.select = PatchGen(backbone.dim, self.grid[0] * self.grid[1], grid=self.grid, refine=config.refine)
        elif pool == "select":
            self.select = Selector(backbone)
        out = 0 if prototypes else config.projection_out  # SimGCD contrasts in the bottleneck
        self.head = ProjectionHead(backbone.dim, config.projection_hidden, config.projection_bottleneck, out)
        # same length as a linear layer's rows: gradients of their direction are divided by it
        self.prototypes = nn.Parameter(nn.Linear(backbone.dim, prototypes).weight.detach()) if prototypes else None

    def read(self, images: Tensor, prompts: Tensor | None = None) -> Output:
        """Normalised images (B, 3, S, S), with optional prompts (B, k, D), to one vector per image.

        PatchGen's module sees only patch tokens: prompts affect it through the backbone's attention.
        """

        def tokens(images: Tensor, early: Callable[[Tensor], None] | None = None) -> Tokens:
            if prompts is None:
                return self.backbone(images, early)
            return prompted(self.backbone, images, prompts, early)

        if isinstance(self.select, Selector):
            selection = self.select(self.backbone, images, read=tokens)
            return _output(selection.tokens.cls, selection.mask)
        return self._pooled(tokens(images))

    @torch.no_grad()
    def start(self, images: Tensor) -> None:
        """Initialise the mask on normalised images (B, 3, S, S) of the first stage."""
        if isinstance(self.select, Selector):
            self.select.start(self.select(self.backbone, images).early)
        elif self.select is not None:
            self.select.calibrate(self.backbone(images).patches.float())

    def _pooled(self, tokens: Tokens) -> Output:
        """One vector per image from its tokens."""
        if isinstance(self.select, PatchGen):
            chosen = self.select(tokens.patches)
            return _output(chosen.selected, chosen.mask, chosen.complementary)
        return _output(tokens.cls if self.pool == "cls" else tokens.patches.mean(1))

    def project(self, features: Tensor) -> Tensor:
        return self.head(features)

    def classify(self, features: Tensor, count: int) -> Tensor:
        """Cosines (B, count) with the first prototypes; those of later stages are not used yet."""
        if self.prototypes is None:
            raise ValueError("this model has no learned prototypes: only simgcd makes some")
        return F.normalize(features, dim=1) @ F.normalize(self.prototypes[:count], dim=1).T


def _output(features: Tensor, mask: Tensor | None = None, complementary: Tensor | None = None) -> Output:
    """An output without logits, (B, 0): the classes of a stream are discovered by clustering."""
    return Output(features.new_empty(len(features), 0), features, mask, complementary=complementary)


def build_stream_model(
    config: StreamConfig,
    pool: str,
    prototypes: int,
    progress: Callable[[str], None] | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> StreamModel:
    """The model before the first stage; its weights depend on the seed alone, not on the random state.

    Args:
        recorded: The run's record of its backbone, if it is resumed or used.
    """
    backbone = load_backbone(config.backbone, image_size=config.image_size, progress=progress, recorded=recorded)
    if config.normalization == "imagenet":
        backbone.use_imagenet()
    set_tuning(backbone, config.tune)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return StreamModel(backbone, config, pool, prototypes)

"""What a stream method trains: a backbone that may be prompted, one vector an image, and the head it is compared in.

seen = model.read(images, prompts)      # seen.features (B, D): CLS, the mean token, or z+ of PatchGen
model.project(seen.features)            # (B, E), unit vectors, for the contrastive losses alone
model.classify(seen.features, 80)       # (B, 80) cosines with the first 80 learned prototypes (SimGCD)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config.stream import StreamConfig
from patchgen.discovery.prompts import prompted
from patchgen.methods.stream.contrastive import ProjectionHead
from patchgen.model.backbone import Backbone, Tokens, load_backbone, set_tuning
from patchgen.model.classifier import Output
from patchgen.model.patchgen import PatchGen
from patchgen.model.selector import Selector


class StreamModel(nn.Module):
    """A backbone, a pool (`cls`, `mean`, `patchgen`, `select`), a projection head and, if asked for, prototypes."""

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
        # as long as a linear layer's rows: their length divides the gradients of their direction
        self.prototypes = nn.Parameter(nn.Linear(backbone.dim, prototypes).weight.detach()) if prototypes else None

    def read(self, images: Tensor, prompts: Tensor | None = None) -> Output:
        """Normalised images (B, 3, S, S), and prompts (B, k, D) if any, to one vector an image.

        The module sees patch tokens alone: prompts act on it through the backbone's attention.
        """

        def tokens(images: Tensor, early: Callable[[Tensor], None] | None = None) -> Tokens:
            if prompts is None:
                return self.backbone(images, early)
            return prompted(self.backbone, images, prompts, early)

        if isinstance(self.select, Selector):
            found = self.select(self.backbone, images, read=tokens)
            return _output(found.tokens.cls, found.mask)
        return self._pooled(tokens(images))

    @torch.no_grad()
    def start(self, images: Tensor) -> None:
        """Give the mask its start on normalised images (B, 3, S, S) of the first stage."""
        if isinstance(self.select, Selector):
            self.select.start(self.select(self.backbone, images).early)
        elif self.select is not None:
            self.select.calibrate(self.backbone(images).patches.float())

    def _pooled(self, tokens: Tokens) -> Output:
        """One vector an image, of its tokens."""
        if isinstance(self.select, PatchGen):
            chosen = self.select(tokens.patches)
            return _output(chosen.selected, chosen.mask, chosen.complementary)
        return _output(tokens.cls if self.pool == "cls" else tokens.patches.mean(1))

    def project(self, features: Tensor) -> Tensor:
        return self.head(features)

    def classify(self, features: Tensor, count: int) -> Tensor:
        """Cosines (B, count) with the first prototypes; those of later stages are not there yet."""
        if self.prototypes is None:
            raise ValueError("this model has no learned prototypes: only simgcd makes some")
        return F.normalize(features, dim=1) @ F.normalize(self.prototypes[:count], dim=1).T


def _output(features: Tensor, mask: Tensor | None = None, complementary: Tensor | None = None) -> Output:
    """An output without logits, (B, 0): a stream's classes are found by clustering."""
    return Output(features.new_empty(len(features), 0), features, mask, complementary=complementary)


def build_stream_model(
    config: StreamConfig,
    pool: str,
    prototypes: int,
    progress: Callable[[str], None] | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> StreamModel:
    """The model before the first stage; the same seed gives the same weights whatever was drawn before.

    Args:
        recorded: What the run has recorded of its backbone, where it is continued or used.
    """
    backbone = load_backbone(config.backbone, image_size=config.image_size, progress=progress, recorded=recorded)
    if config.normalization == "imagenet":
        backbone.use_imagenet()
    set_tuning(backbone, config.tune)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return StreamModel(backbone, config, pool, prototypes)

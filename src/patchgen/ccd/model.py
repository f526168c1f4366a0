"""The model of a stream method: a backbone with optional prompts, one vector per image, and a projection head.

Prompts are means of an image's likeliest mixture components, added to its input tokens: [CLS, prompts, registers if
any, patches]. A prompt carries the position of CLS, as in PromptCCD (ECCV 2024); none if CLS has none (DINOv3 rotates
only its patches) or there is no CLS (SigLIP, I-JEPA).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.ccd.settings import StreamConfig
from patchgen.common.text import first_line
from patchgen.model.backbone import Backbone, Tokens, load_backbone
from patchgen.model.classifier import Output
from patchgen.model.generic import on_tensor
from patchgen.model.patchgen import PatchGen
from patchgen.model.preprocessing import IMAGENET
from patchgen.model.selector import Selector
from patchgen.model.tuning import set_tuning

SIDE = 4  # patches, of the image that tries prompts
START = 0.9  # initial standard deviation of a layer times the square root of its inputs: DINO's 0.02 at 2048


class ProjectionHead(nn.Module):
    """Features (B, D) -> unit vectors (B, out): two hidden layers, a unit bottleneck, a layer of unit rows.

    The shape is that of DINO's head; with `out` 0 it ends with the bottleneck, as SimGCD's projector does. With 0.02
    for all layers, a narrow head starts with large gradients, which are divided by its outputs' length.
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
        """Normalised images (B, 3, S, S), with optional prompts (B, k, D), to one vector per image; no logits, (B, 0).

        PatchGen's module sees only patch tokens: prompts affect it through the backbone's attention.
        """

        def tokens(images: Tensor, early: Callable[[Tensor], None] | None = None) -> Tokens:
            return self.backbone(images, early) if prompts is None else prompted(self.backbone, images, prompts, early)

        mask, complementary = None, None
        if isinstance(self.select, Selector):
            selection = self.select(self.backbone, images, read=tokens)
            features, mask = selection.tokens.cls, selection.mask
        elif self.select is not None:
            selected = self.select(tokens(images).patches)
            features, mask, complementary = selected.selected, selected.mask, selected.complementary
        else:
            seen = tokens(images)
            features = seen.cls if self.pool == "cls" else seen.patches.mean(1)
        return Output(features.new_empty(len(features), 0), features, mask, complementary=complementary)

    @torch.no_grad()
    def start(self, images: Tensor) -> None:
        """Initialise the mask on normalised images (B, 3, S, S) of the first stage."""
        if isinstance(self.select, Selector):
            self.select.start(self.select(self.backbone, images).early)
        elif self.select is not None:
            self.select.calibrate(self.backbone(images).patches.float())

    def classify(self, features: Tensor, count: int) -> Tensor:
        """Cosines (B, count) with the first prototypes; those of later stages are not used yet."""
        assert self.prototypes is not None  # simgcd makes some
        return F.normalize(features, dim=1) @ F.normalize(self.prototypes[:count], dim=1).T


def build_stream_model(
    config: StreamConfig,
    pool: str,
    prototypes: int,
    progress: Callable[[str], None] | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> StreamModel:
    """The model before the first stage; its weights depend on the seed alone. ``recorded`` is the run's backbone."""
    backbone = load_backbone(config.backbone, image_size=config.image_size, progress=progress, recorded=recorded)
    if config.normalization == "imagenet":
        backbone.expect(IMAGENET)
    set_tuning(backbone, config.tune)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return StreamModel(backbone, config, pool, prototypes)


# Prompts


def prompted(
    backbone: Backbone, images: Tensor, prompts: Tensor, early: Callable[[Tensor], None] | None = None
) -> Tokens:
    """The backbone's tokens in the presence of prompts (B, k, D); the prompts' own outputs are dropped."""
    embeddings: Any = backbone.model.embeddings  # the module that makes the sequence of tokens
    has_cls = min(backbone.num_prefix_tokens, 1)
    position = _cls_position(embeddings) if has_cls else 0.0  # (D,)

    def insert(sequence: Tensor) -> Tensor:  # (B, prefix + P, D)
        placed = (prompts + position).to(sequence.dtype)
        return torch.cat([sequence[:, :has_cls], placed, sequence[:, has_cls:]], dim=1)

    with on_tensor(embeddings, insert):
        tokens = backbone(images, early)
    # the backbone drops as many leading tokens as it has prefix tokens of its own; the patches are the last P
    patches = tokens.patches[:, prompts.shape[1] :]
    return Tokens(patches, tokens.cls if has_cls else patches.mean(1), tokens.grid)


def check_promptable(backbone: Backbone) -> None:
    """ValueError unless this backbone supports prompts, tested with one black image."""
    if problem := _problem(backbone):
        raise ValueError(
            f"prompts are inserted between a backbone's own tokens, and {backbone.source!r} ({backbone.model_type}) "
            f"takes none ({problem}); choose another --backbone, such as DINOv2, ViT or CLIP, or --method "
            "gcd+patchgen, which has no prompts"
        )


@torch.no_grad()
def _problem(backbone: Backbone) -> str:
    """The problem with two prompts and one image; empty if there is none."""
    if any("relative_position" in name for name, _ in backbone.model.named_parameters()):
        return "its attention has relative positions, which a prompt has none of"  # they shift those of the patches
    weight, side = next(backbone.parameters()), SIDE * backbone.patch_size
    images, prompts = weight.new_zeros(1, 3, side, side), weight.new_zeros(1, 2, backbone.dim)
    prompts[:, 0] = torch.arange(backbone.dim, device=weight.device).sin()  # moves no random generator
    try:
        patches, flipped = (prompted(backbone, images, order).patches for order in (prompts, prompts.flip(1)))
    except Exception as error:  # models raise many types on unexpected numbers of tokens
        return first_line(error)
    if patches.shape[1] != SIDE**2:
        return f"of {SIDE**2} patches {patches.shape[1]} remain after it"
    same = torch.allclose(patches, flipped, rtol=1e-3, atol=1e-3)
    return "" if same else "its attention gives them places, but they are a set"


def _cls_position(embeddings: nn.Module) -> Tensor | float:
    """The position vector (D,) that the backbone adds to its CLS token; 0 where it adds none."""
    learned = getattr(embeddings, "position_embeddings", None)  # (1, 1 + P, D)
    if isinstance(learned, Tensor):
        return learned[0, 0]
    table = getattr(embeddings, "position_embedding", None)  # CLIP
    return table.weight[0] if isinstance(table, nn.Embedding) else 0.0

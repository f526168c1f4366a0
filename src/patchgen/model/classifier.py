"""A backbone, a way to turn its tokens into one vector, and a linear head: what every method trains.

The ways ("pools") are ``cls`` and ``mean`` for the baselines and ``patchgen`` for the module, so that methods differ
in nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from patchgen.model.backbone import Backbone, Tokens
from patchgen.model.patchgen import PatchGen

POOLS = ("cls", "mean", "patchgen")


class Output(NamedTuple):
    logits: Tensor  # (B, C)
    features: Tensor  # (B, D)  what the head reads: z+ for PatchGen
    mask: Tensor | None = None  # (B, P)
    complementary_logits: Tensor | None = None  # (B, C)  head on z-, without gradient: only ever a reference

    def masked(self) -> tuple[Tensor, Tensor]:
        """The mask and the complementary logits of a model that has them."""
        if self.mask is None or self.complementary_logits is None:
            raise ValueError("this model has no mask: only the pool 'patchgen' makes one")
        return self.mask, self.complementary_logits


class Classifier(nn.Module):
    """Images in, logits (and a mask) out.

    The forward pass has two stages, ``read`` (backbone and what the pool keeps of its tokens) and ``classify``
    (everything behind it): where the backbone is frozen the first is computed once per image and kept.
    """

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        *,
        image_size: int,
        pool: str = "patchgen",
        refine: str = "ln-linear",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, not {pool!r}")
        self.backbone = backbone
        self.pool = pool
        self.grid = backbone.grid(image_size)
        patches = self.grid[0] * self.grid[1]
        self.select = PatchGen(backbone.dim, patches, grid=self.grid, refine=refine) if pool == "patchgen" else None
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(backbone.dim, num_classes)

    def read(self, images: Tensor | Tokens) -> Tensor:
        """Normalised images (B, 3, H, W), or their tokens -> (B, D) for the plain pools, (B, P, D) for PatchGen."""
        tokens: Tokens = images if isinstance(images, Tokens) else self.backbone(images)
        if self.pool == "cls":
            return tokens.cls
        return tokens.patches.mean(1) if self.pool == "mean" else tokens.patches

    def classify(self, read: Tensor, mask: Tensor | None = None) -> Output:
        if self.select is None:
            return Output(self.head(self.drop(read)), read)
        chosen = self.select(read, mask=mask)
        rest = nn.functional.linear(chosen.complementary.detach(), self.head.weight.detach(), self.head.bias.detach())
        return Output(self.head(self.drop(chosen.selected)), chosen.selected, chosen.mask, rest)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Output:
        """Images (four dimensions), or what ``read`` made of them earlier (two or three); a mask to use, if given."""
        return self.classify(self.read(inputs) if inputs.ndim == 4 else inputs, mask)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

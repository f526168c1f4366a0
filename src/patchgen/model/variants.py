"""The alternative selectors of the paper's ablation (Table 8, rows 2.1 to 2.4).

    2.1  StaticMask         m_p = sigmoid(a_p), the same for all images;  r+_j = sum_p rho_jp m_p z_pj
    2.2  ChannelMask        m_j = sigmoid(b_j);                           r+_j = m_j mean_p z_pj
    2.3  PlainAttention     no mask;                                      r+   = mean_p u_p
    2.4  ScaledAttention    as 2.3; its outgoing scores, scaled to [0, 1] in each image, are the input of L_ms

The paper names these rows without formulas: they are our interpretation. The rest, and the start, is PatchGen's. Where
no patch is left out (2.2, 2.3) the mask is one; 2.4 reports its scaled scores, which do not weight the patches.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.model.patchgen import PatchGen, PatchGenOutput

Grid = tuple[int, int]


class Variant(PatchGen):
    """PatchGen without the parts in ``lacks``; the arguments are PatchGen's."""

    lacks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        for part in self.lacks:
            delattr(self, part)

    @classmethod
    def of(cls, whole: PatchGen, refine: str) -> Self:
        """The variant with the initial values of a PatchGen, and the same ``refine``."""
        dim, patches = whole.rho.shape
        variant = cls(dim, patches, grid=whole.grid, num_heads=whole.num_heads, refine=refine)
        variant.load_state_dict(whole.state_dict(), strict=False)
        return variant

    def forward(self, tokens: Tensor, grid: Grid | None = None, mask: Tensor | None = None) -> PatchGenOutput:
        grid = grid or self._grid_of(tokens.shape[1])
        return self._represent(*self._select(tokens, grid, mask))

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The mask (B, P), r+ and r- (B, D)."""
        raise NotImplementedError


class WithoutAttention(Variant):
    """Uses the backbone's tokens Z directly."""

    lacks: ClassVar[tuple[str, ...]] = ("qkv", "out", "log_temperature")

    def calibrate(self, tokens: Tensor) -> None:
        """Does nothing: there are no queries and keys to scale, and the mask starts at one half."""


class StaticMask(WithoutAttention):
    """Row 2.1: one learned weight per position, shared by all images."""

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        self.position = nn.Parameter(torch.zeros(num_patches))  # a

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if mask is None:
            position: Tensor = self.position  # (P,)
            if tuple(grid) != self.grid:
                image = position.view(1, 1, *self.grid)
                position = F.interpolate(image, size=tuple(grid), mode="bicubic", align_corners=False).flatten()
            mask = position.sigmoid().expand(len(tokens), -1)
        return mask, *self._aggregate(tokens, mask, self.rho_on(grid))


class ChannelMask(WithoutAttention):
    """Row 2.2: one learned weight per channel, on the mean of the tokens."""

    lacks = (*WithoutAttention.lacks, "rho")

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        self.channel = nn.Parameter(torch.zeros(dim))  # b

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        mask = tokens.new_ones(tokens.shape[:2]) if mask is None else mask  # (B, P)
        selected = self.channel.sigmoid() * (mask.to(tokens).unsqueeze(2) * tokens).mean(1)  # (B, D)
        return mask, selected, tokens.mean(1) - selected


class PlainAttention(Variant):
    """Row 2.3: PatchGen's attention, then the mean over the patches: the aggregator stays at 1 / P."""

    scaled = False

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        self.rho.requires_grad_(False)

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._heads(tokens)  # each (B, H, P, d_k)
        weight = tokens.new_ones(tokens.shape[:2]) if mask is None else mask  # (B, P)
        reported = _scaled(self._score(q, k)) if self.scaled and mask is None else weight
        return reported, *self._aggregate(self._context(q, k, v), weight, self.rho_on(grid))


class ScaledAttention(PlainAttention):
    """Row 2.4: reports the scores of Eq. 3 before the sigmoid, scaled to [0, 1] within each image."""

    scaled = True


def _scaled(score: Tensor) -> Tensor:
    low, high = score.aminmax(dim=1, keepdim=True)  # of (B, P)
    return (score - low) / (high - low).clamp(min=torch.finfo(score.dtype).tiny)  # equal scores are all 0

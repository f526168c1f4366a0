"""Augmentation for stained tissue, a whole batch on its device: quarter turns, mirroring, and stain strength.

    draws = Histology().draw(batch=96, generator=generator)      # every random number, on the CPU
    images = draws.apply(pixels.float() / 255, size=224)

Tissue has no orientation, so an image is put into one of the eight orientations of a square: an exact rearrangement of
pixels, without resampling, because the size of nuclei is informative. Labs differ in stain: light is absorbed
exponentially, so in optical density (the negative logarithm) stains add up, and "scale each stain by a, shift it by b"
(Tellez et al. 2018, "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference", IEEE TMI 37(9))
is one affine map of an image's densities. The stain colours are those of Ruifrok and Johnston (2001).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patchgen.data.augment import Draw, Finish, send

# densities in red, green, blue of haematoxylin, eosin and the remaining third, DAB; rows are made unit vectors
STAINS = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78))


@dataclass(frozen=True)
class Histology:
    """Ranges of the random operations; zero everywhere changes nothing."""

    turn: float = 0.75
    """Probability of a turn; 90, 180 and 270 degrees are equally likely."""
    flip: float = 0.5
    """Probability of a mirror image, left to right."""
    scale: float = 0.05
    """Each stain is multiplied by a factor uniform in [1 - x, 1 + x]."""
    shift: float = 0.05
    """To each stain's density is added a number uniform in [-x, x]."""

    def draw(self, batch: int, generator: torch.Generator) -> HistologyDraw:
        """Draw every random number of a batch from a CPU `generator`; the amount depends on `batch` alone."""
        turned, quarters, flip = torch.rand(3, batch, generator=generator)
        scale, shift = 2 * torch.rand(2, batch, len(STAINS), generator=generator) - 1
        return HistologyDraw(
            turns=torch.where(turned < self.turn, 1 + (3 * quarters).long().clamp(max=2), 0),
            flip=flip < self.flip,
            scale=1 + self.scale * scale,
            shift=self.shift * shift,
        )


@dataclass(frozen=True)
class HistologyDraw(Draw):
    """The numbers of `Histology`; a mirrored image is then turned."""

    turns: Tensor  # (B,) quarter turns counter-clockwise, as torch.rot90 counts them
    scale: Tensor  # (B,3) factor of each stain
    shift: Tensor  # (B,3) density added to each stain

    @torch.no_grad()
    def apply(self, images: Tensor, size: int, finish: Finish = lambda image: image) -> Tensor:
        """Turn, mirror and stain `images` (B,3,size,size) in [0,1]; `finish` as in `AugmentDraw.apply`."""
        if images.shape[-1] != size:
            raise ValueError(f"stain augmentation does not resize: images must have {size} pixels, got {images.shape}")
        self._check_length(images)
        with torch.autocast(images.device.type, enabled=False):  # 8 bits of mantissa would band the colours
            placed = _place(images.float(), self.turns + 4 * self.flip.long())
            matrix = stain_matrix(self.scale, self.shift)  # (B,3,4)
            density = to_density(placed).flatten(2)  # (B,3,size*size)
            stained = torch.baddbmm(matrix[:, :, 3:], matrix[:, :, :3], density)
            return finish(from_density(stained).clamp_(0, 1).unflatten(2, (size, size)))


def to_density(images: Tensor) -> Tensor:
    """Optical density -log10 of values in [0,1]: white is 0, black 2.41 (offset by one 8-bit step to stay finite)."""
    return -torch.log10((255 * images + 1) / 256)


def from_density(density: Tensor) -> Tensor:
    """The inverse of `to_density`, not clamped."""
    return (256 * 10**-density - 1) / 255


def stain_matrix(scale: Tensor, shift: Tensor) -> Tensor:
    """The affine map of densities (B,3,4) that scales and shifts each stain by `scale` and `shift` (B,3).

    Densities are d = S' c for amounts c of the stains with unit rows S; c' = scale c + shift gives
    d' = S' diag(scale) S'^-1 d + S' shift.
    """
    stains = torch.tensor(STAINS, dtype=torch.float64)
    mixing = (stains / stains.norm(dim=1, keepdim=True)).T  # (3,3), columns are stains; on the CPU for its inverse
    inverse, mixing = (send(each.to(scale.dtype), scale.device) for each in (mixing.inverse(), mixing))
    linear = mixing @ (scale[:, :, None] * inverse)  # (B,3,3)
    return torch.cat((linear, (shift @ mixing.T)[:, :, None]), dim=2)


def _place(images: Tensor, position: Tensor) -> Tensor:
    """Each image in its orientation (B,): 0-3 turned, 4-7 mirrored and turned; one gather for the batch."""
    size = images.shape[-1]
    pixels = torch.arange(size * size, device=images.device).view(size, size)
    sources = [torch.rot90(start, turn, (0, 1)) for start in (pixels, pixels.flip(1)) for turn in range(4)]
    table = torch.stack(sources).flatten(1)  # (8, size*size): which pixel goes where
    chosen = table[position][:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, chosen).view_as(images)

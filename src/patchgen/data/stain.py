"""Stained tissue: augmentation of a whole batch on its device, and normalisation of tiles to one reference.

In optical density stains add up, so "scale each stain by a, shift it by b" (Tellez et al. 2018, IEEE TMI 37(9)) is one
affine map of an image's densities; the stain colours are those of Ruifrok and Johnston (2001). Normalisation is that of
Macenko et al. (ISBI 2009), as torchstain computes it; its reference is the median over training tiles.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.data.augment import Draw, Finish, send

# densities in red, green, blue of haematoxylin, eosin and the remaining third, DAB; rows are made unit vectors
STAINS = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78))
TILES = 64  # training tiles for fitting the reference
BRIGHT = 205  # a pixel with a channel above this has hardly any stain: 240 exp(-0.15) - 1, the method's threshold
FEWEST = 0.02  # minimum share of stained pixels; tiles below it are left unchanged
INSTALL = 'stain normalisation needs torchstain, which is not installed: pip install "patchgen[stain]"'


@dataclass(frozen=True)
class Histology:
    """Ranges of the random operations; zero everywhere changes nothing."""

    turn: float = 0.75  # probability of a turn; 90, 180 and 270 degrees are equally likely
    flip: float = 0.5  # probability of a mirror image, left to right
    scale: float = 0.05  # each stain is multiplied by a factor uniform in [1 - x, 1 + x]
    shift: float = 0.05  # to each stain's density is added a number uniform in [-x, x]

    def draw(self, batch: int, generator: torch.Generator) -> "HistologyDraw":
        """Every random number of a batch from a CPU `generator`; the amount drawn depends on `batch` alone."""
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
    turns: Tensor  # (B,) quarter turns counter-clockwise, after mirroring
    scale: Tensor  # (B,3) factor of each stain
    shift: Tensor  # (B,3) density added to each stain

    @torch.no_grad()
    def apply(self, images: Tensor, size: int, finish: Finish = lambda image: image) -> Tensor:
        """Turn, mirror and stain `images` (B,3,size,size) in [0,1]; `finish` as in `AugmentDraw.apply`."""
        with torch.autocast(images.device.type, enabled=False):  # 8 bits of mantissa would band the colours
            placed = _place(images.float(), self.turns + 4 * self.flip.long())
            matrix = _stain_matrix(self.scale, self.shift)  # (B,3,4)
            density = to_density(placed).flatten(2)  # (B,3,size*size)
            stained = torch.baddbmm(matrix[:, :, 3:], matrix[:, :, :3], density)
            values = (256 * 10**-stained - 1) / 255  # the inverse of `to_density`
            return finish(values.clamp_(0, 1).unflatten(2, (size, size)))


def to_density(images: Tensor) -> Tensor:
    """Optical density -log10 of values in [0,1]: white is 0, black 2.41 (offset by one 8-bit step to stay finite)."""
    return -torch.log10((255 * images + 1) / 256)


def _stain_matrix(scale: Tensor, shift: Tensor) -> Tensor:
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
    order = table[position][:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, order).view_as(images)


@dataclass(frozen=True)
class Macenko:
    """The reference for normalising tiles."""

    stains: tuple[tuple[float, ...], ...]  # (3, 2): densities in red, green, blue of haematoxylin and eosin
    strengths: tuple[float, ...]  # (2,): 99th percentile of each stain's amount

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """A tile (H, W, 3) uint8 with the reference's stains; a tile without stain is returned unchanged."""
        if not is_stained(image):
            return image
        with np.errstate(all="ignore"):
            normalised, _, _ = self._normalizer.normalize(image, stains=False)
        return np.ascontiguousarray(normalised)

    @cached_property
    def _normalizer(self) -> Any:
        normalizer = _normalizer()
        normalizer.HERef, normalizer.maxCRef = np.array(self.stains), np.array(self.strengths)
        return normalizer

    def facts(self) -> dict[str, Any]:
        return {"kind": "macenko", "stains": [list(row) for row in self.stains], "strengths": list(self.strengths)}


def read_macenko(facts: Any, where: str) -> Macenko:
    """The reference that `facts` describe; ValueError if they are invalid, or torchstain is missing."""
    _normalizer()
    try:
        stains, strengths = (np.array(facts[name], dtype=np.float64) for name in ("stains", "strengths"))
        usable = facts["kind"] == "macenko" and stains.shape == (3, 2) and strengths.shape == (2,)
    except (KeyError, TypeError, ValueError, OverflowError):
        usable = False
    if not usable or not ((np.abs(stains) <= 1.001).all() and (strengths > 0).all() and (strengths < 1e3).all()):
        rule = "unit columns, strengths above 0 and below 1000"
        raise ValueError(f"{where} has no usable stain reference ({rule}); get or train the model again")
    return _reference(stains, strengths)


def is_stained(image: np.ndarray) -> bool:
    """Whether enough of a tile (H, W, 3) uint8 is stained to estimate its stains."""
    return bool((image <= BRIGHT).all(axis=2).mean() >= FEWEST)


def fit_macenko(images: Iterable[np.ndarray]) -> Macenko:
    """The median stains and strengths of tiles (H, W, 3) uint8; ValueError if none is stained."""
    fits = []
    for image in filter(is_stained, images):
        normalizer = _normalizer()
        normalizer.fit(image)
        if np.isfinite(normalizer.HERef).all() and (normalizer.maxCRef > 0).all():
            fits.append((normalizer.HERef, normalizer.maxCRef))
    if not fits:
        raise ValueError("--stain macenko: no training image is stained (all are nearly white); leave --stain out")
    stains, strengths = (np.median(np.stack(parts), axis=0) for parts in zip(*fits, strict=True))
    return _reference(stains / np.linalg.norm(stains, axis=0), strengths)


def _reference(stains: np.ndarray, strengths: np.ndarray) -> Macenko:
    return Macenko(tuple(map(tuple, stains.tolist())), tuple(strengths.tolist()))


def _normalizer() -> Any:
    try:
        from torchstain.numpy.normalizers.macenko import NumpyMacenkoNormalizer
    except ImportError as error:
        raise ValueError(INSTALL) from error
    return NumpyMacenkoNormalizer()

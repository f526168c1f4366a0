"""Stain normalisation: map every tile to the stain colours and strengths of the training tiles.

    reference = fit_macenko(training_tiles)       # (H, W, 3) uint8 each
    tile = reference(tile)                        # the same shape

Macenko et al., "A method for normalizing histology slides for quantitative analysis" (ISBI 2009), as torchstain
computes it (extra `stain`): a tile's two stains are the extreme directions of its optical densities; its densities are
expressed in them and recombined with the reference's stains, at the reference's strength (99th percentile). The
reference is the median over training tiles, so that it does not depend on a single tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

TILES = 64  # training tiles for fitting the reference
BRIGHT = 205  # a pixel with a channel above this has hardly any stain: 240 exp(-0.15) - 1, the method's threshold
FEWEST = 0.02  # minimum share of stained pixels; tiles below it are left unchanged
INSTALL = 'stain normalisation needs torchstain, which is not installed: pip install "patchgen[stain]"'


@dataclass(frozen=True)
class Macenko:
    """The reference for normalising tiles."""

    stains: tuple[tuple[float, float], ...]  # (3, 2): densities in red, green, blue of haematoxylin and eosin
    strengths: tuple[float, float]  # 99th percentile of each stain's amount

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
        """The facts stored in a checkpoint or model folder."""
        return {"kind": "macenko", "stains": [list(row) for row in self.stains], "strengths": list(self.strengths)}


def read_macenko(facts: Any, where: str) -> Macenko:
    """The reference that `facts` describe.

    Raises:
        ValueError: they are invalid, or torchstain is missing.
    """
    _normalizer()
    try:
        stains, strengths = (np.array(facts[name], dtype=np.float64) for name in ("stains", "strengths"))
    except (KeyError, TypeError, ValueError, OverflowError):
        stains = strengths = np.zeros(0)
    good = isinstance(facts, Mapping) and facts.get("kind") == "macenko" and stains.shape == (3, 2)
    if not good or strengths.shape != (2,) or not (np.isfinite(stains).all() and (strengths > 0).all()):
        raise ValueError(f"{where} has no usable stain reference; get or train the model again")
    if not (np.abs(stains) <= 1.001).all() or not (strengths < 1e3).all():
        raise ValueError(f"{where}: the stain reference must have unit columns and strengths below 1000; get it again")
    return _reference(stains, strengths)


def is_stained(image: np.ndarray) -> bool:
    """Whether enough of a tile (H, W, 3) uint8 is stained to estimate its stains."""
    return bool((image <= BRIGHT).all(axis=2).mean() >= FEWEST)


def fit_macenko(images: Iterable[np.ndarray]) -> Macenko:
    """The median stains and strengths of tiles (H, W, 3) uint8.

    Raises:
        ValueError: no tile is stained, or torchstain is missing.
    """
    found = []
    for image in filter(is_stained, images):
        normalizer = _normalizer()
        normalizer.fit(image)
        if np.isfinite(normalizer.HERef).all() and (normalizer.maxCRef > 0).all():
            found.append((normalizer.HERef, normalizer.maxCRef))
    if not found:
        raise ValueError("--stain macenko: no training image is stained (all are nearly white); leave --stain out")
    stains, strengths = (np.median(np.stack(parts), axis=0) for parts in zip(*found, strict=True))
    return _reference(stains / np.linalg.norm(stains, axis=0), strengths)


def _reference(stains: np.ndarray, strengths: np.ndarray) -> Macenko:
    rows = tuple((float(haematoxylin), float(eosin)) for haematoxylin, eosin in stains)
    return Macenko(rows, (float(strengths[0]), float(strengths[1])))


def _normalizer() -> Any:
    try:
        from torchstain.numpy.normalizers.macenko import NumpyMacenkoNormalizer
    except ImportError as error:
        raise ValueError(INSTALL) from error
    return NumpyMacenkoNormalizer()

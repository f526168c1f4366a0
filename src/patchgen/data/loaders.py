"""Balanced batches: the same number of images from each source domain at every step, a function of (seed, step) alone.

Resuming therefore sees the same batches, and several devices share exactly the batch of a single one.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from patchgen.data.augment import Augment, AugmentDraw, channels
from patchgen.data.images import ImageStore
from patchgen.data.stain import Histology, HistologyDraw

AUGMENTATIONS: dict[str, Callable[[], Augment | Histology]] = {
    "natural": Augment,
    "crop-flip": partial(Augment, brightness=0, contrast=0, saturation=0, hue=0, grayscale=0),
    "histology": Histology,
}


@dataclass(frozen=True)
class Batch:
    image: Tensor  # (B, 3, S, S) uint8 from the store; float and normalised once it is on the device
    label: Tensor  # (B,)  -1 for none
    domain: Tensor  # (B,)
    index: Tensor  # (B,)  row of the table
    draw: AugmentDraw | HistologyDraw | None = None
    num_domains: int | None = None  # if samples are sorted by domain id, in equal numbers; else None


class DomainBatches:
    """Batches of the training rows, sampled per domain with replacement, as in DomainBed."""

    def __init__(
        self, store: ImageStore, label: np.ndarray, rows: Mapping[int, np.ndarray], per_domain: int, seed: int,
        augment: Augment | Histology | None,
    ) -> None:  # fmt: skip
        """label: (N,) class id of each row of the store; rows: the training rows of each domain id."""
        self.store, self.label, self.rows = store, label, dict(rows)
        self.per_domain, self.seed, self.augment = per_domain, seed, augment
        self._ahead = ThreadPoolExecutor(1)
        self._coming: dict[tuple[int, int, int], Future[Tensor]] = {}

    def rows_at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and domain ids of the global batch, sorted by domain: (K * per_domain,) each."""
        generators = (np.random.default_rng([self.seed, domain, step]) for domain in self.rows)
        drawn = [rng.choice(rows, self.per_domain) for rng, rows in zip(generators, self.rows.values(), strict=True)]
        return np.concatenate(drawn), np.repeat(list(self.rows), self.per_domain)

    def at(self, step: int, part: int = 0, parts: int = 1, images: bool = True) -> Batch:
        """A part of a step's batch; ``images=False`` leaves the pixels out (features may be cached)."""
        rows, domain = self.rows_at(step)
        mine, draw, image = self._slice(part, parts), None, torch.empty(0)
        if self.augment is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            draw = self.augment.draw(len(rows), generator)[torch.from_numpy(mine)]
        if images:
            coming = self._coming.pop((step, part, parts), None)
            image = coming.result() if coming is not None else self._read(step, part, parts)
        label, domain_ids, index = map(torch.from_numpy, (self.label[rows[mine]], domain[mine], rows[mine]))
        return Batch(image, label, domain_ids, index, draw, num_domains=len(self.rows))

    def expect(self, step: int, part: int = 0, parts: int = 1) -> None:
        """Prefetch the pixels of a later batch in the background."""
        self._coming[step, part, parts] = self._ahead.submit(self._read, step, part, parts)

    def _read(self, step: int, part: int, parts: int) -> Tensor:
        return self.store.load(self.rows_at(step)[0][self._slice(part, parts)])

    def _slice(self, part: int, parts: int) -> np.ndarray:
        """Positions of a part in the global batch: the same share of every domain."""
        width = self.per_domain // parts
        start = np.arange(len(self.rows))[:, None] * self.per_domain + part * width
        return (start + np.arange(width)).ravel()


def prepare(
    pixels: Tensor, draw: AugmentDraw | HistologyDraw | None, size: int, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Bytes (B, 3, size, size) of the store -> floats of the same shape, augmented by `draw` and normalised."""
    image = pixels if isinstance(draw, AugmentDraw) else pixels.float().div_(255)
    centre, spread = channels(mean, pixels.device), channels(std, pixels.device)
    shift, scale = -centre / spread, 1 / spread

    def standardize(image: Tensor) -> Tensor:
        return torch.addcmul(shift, image, scale, out=image)  # one pass: (image - mean) / std

    return draw.apply(image, size, standardize) if draw is not None else standardize(image)

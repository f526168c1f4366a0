"""Pixels of a stream: two views of each image for training, the centre for everything else.

Images are stored at 8/7 of the working size. With `keep_aspect` that is their shorter side, resized bicubically, as in
PromptCCD; without it, images are squashed to a square. A step's views are a function of (seed, stage, epoch, step).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchgen.common.reading import batches
from patchgen.data.augment import Augment, send
from patchgen.data.images import ImageStore
from patchgen.data.table import Table
from patchgen.model.backbone import Backbone

CROP = 7 / 8  # working size / stored size
BATCH = 128  # batch size of passes without gradients


class StreamImages:
    """Normalised pixels on a device, by row of the table."""

    def __init__(
        self, table: Table, backbone: Backbone, size: int, device: torch.device, cache: Path | None, keep_aspect: bool
    ) -> None:
        self.size, self.stored = size, int(size / CROP)
        interpolation = backbone.interpolation
        self.store = ImageStore(table.files, self.stored, cache, keep_aspect=keep_aspect, interpolation=interpolation)
        self.normalised, self.device = backbone.normalised, device
        self.augment = Augment(
            scale=((size / self.stored) ** 2,) * 2, ratio=(1.0, 1.0), brightness=0, contrast=0, saturation=0, hue=0,
            grayscale=0,
        )  # fmt: skip

    def centre(self, rows: np.ndarray) -> Tensor:
        """Centre crops (B, 3, S, S) in 0..255, uint8."""
        if self.store.keep_aspect:
            return crops(self.store.images(rows), None, self.size)
        start = (self.stored - self.size) // 2
        return self.store.load(rows)[:, :, start : start + self.size, start : start + self.size]

    def plain(self, rows: np.ndarray) -> Iterator[Tensor]:
        """Batches of normalised centre crops; the next one is read while the current one is used."""
        for _, pixels in batches(rows, self.centre, BATCH):
            yield self.normalised(send(pixels, self.device))

    def views(self, parts: list[np.ndarray], seed: tuple[int, int, int]) -> Iterator[Tensor]:
        """Two views of each image of each step (B,), (2B, 3, S, S), the first views first."""
        load = self.store.images if self.store.keep_aspect else self.store.load
        for step, ([part], [pixels]) in enumerate(batches(parts, load, 1, each=True)):
            number = np.random.SeedSequence((*seed, step)).generate_state(1, np.uint64)[0] >> np.uint64(1)
            generator = torch.Generator().manual_seed(int(number))
            if self.store.keep_aspect:
                drawn = torch.rand(2 * len(part), 3, generator=generator)
                views = send(crops(pixels * 2, drawn, self.size), self.device)
            else:
                draw = self.augment.draw(2 * len(part), generator).to(self.device)
                views = draw.apply(send(pixels, self.device).float().div(255).repeat(2, 1, 1, 1), self.size)
            yield self.normalised(views)


def crops(images: list[np.ndarray], drawn: Tensor | None, size: int) -> Tensor:
    """Square crops (B, 3, size, size), uint8, of images (3, h, w) of any shape.

    `drawn` (B, 3) is uniform in [0, 1): vertical and horizontal position, mirrored if below 0.5; None crops the centre,
    rounded half to even, as in torchvision.
    """
    batch = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    for i, image in enumerate(images):
        room = [side - size for side in image.shape[1:]]
        if drawn is None:
            top, left = (round(free / 2) for free in room)
        else:
            top, left = (int(share * (free + 1)) for share, free in zip(drawn[i, :2].tolist(), room, strict=True))
        crop = image[:, top : top + size, left : left + size]
        mirror = drawn is not None and drawn[i, 2] < 0.5
        batch[i] = torch.from_numpy(crop[:, :, ::-1].copy() if mirror else crop.copy())
    return batch


def epoch_parts(rows: np.ndarray, batch: int, seed: tuple[int, int, int]) -> list[np.ndarray]:
    """The rows (B,) of each step of an epoch: shuffled; an incomplete batch is left out unless it is the only one."""
    shuffled = np.random.default_rng(seed).permutation(rows)
    return [shuffled[i * batch : (i + 1) * batch] for i in range(num_steps(len(rows), batch))]


def num_steps(rows: int, batch: int) -> int:
    return max(1, rows // batch)

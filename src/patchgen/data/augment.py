"""Augmentation of a whole batch on its device, in two fused operations: one resampling, one matrix of colours.

This approximates the usual chain (RandomResizedCrop, flip, ColorJitter, RandomGrayscale): boxes are drawn for a square
image and not rounded to pixels, hue turns the chroma plane of YUV instead of the HSV hexagon, values are clamped once
at the end, and the resampling has no antialias, so images should arrive near the working size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ATTEMPTS = 10  # random crops tried before the whole image is taken
LUMA = (0.299, 0.587, 0.114)
Finish = Callable[[Tensor], Tensor]
OPERATIONS = ("brightness", "contrast", "saturation", "hue")  # `AugmentDraw.order` holds positions in this tuple


@dataclass(frozen=True)
class Augment:
    """Ranges of the random operations; the defaults are those of the SWAD / MIRO / GMDG lineage."""

    scale: tuple[float, float] = (0.7, 1.0)  # share of the image's area that a crop keeps
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of a crop
    flip: float = 0.5  # probability of a horizontal flip
    brightness: float = 0.3  # factors of this and the next two are uniform in [1 - x, 1 + x]
    contrast: float = 0.3
    saturation: float = 0.3
    hue: float = 0.3  # turns of the colour circle are uniform in [-x, x]
    grayscale: float = 0.1  # probability of dropping all colour

    def draw(self, batch: int, generator: torch.Generator) -> "AugmentDraw":
        """Every random number of a batch from a CPU `generator`; the amount drawn depends on `batch` alone."""

        def uniform(*shape: int) -> Tensor:
            return torch.rand(batch, *shape, generator=generator)

        def factor(strength: float) -> Tensor:
            low = max(0.0, 1 - strength)
            return low + (1 + strength - low) * uniform()

        return AugmentDraw(
            box=_boxes(self, uniform(ATTEMPTS, 4)),
            flip=uniform() < self.flip,
            brightness=factor(self.brightness),
            contrast=factor(self.contrast),
            saturation=factor(self.saturation),
            hue=self.hue * (2 * uniform() - 1),
            grayscale=uniform() < self.grayscale,
            order=uniform(len(OPERATIONS)).argsort(dim=1),
        )


@dataclass(frozen=True)
class Draw:
    """The random numbers of a batch; `[a:b]` or positions give a rank's share."""

    flip: Tensor  # (B,) bool

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, part: slice | Tensor) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[part] for field in fields(self)})

    def to(self, device: torch.device | str) -> Self:
        return type(self)(**{field.name: send(getattr(self, field.name), device) for field in fields(self)})


@dataclass(frozen=True)
class AugmentDraw(Draw):
    box: Tensor  # (B,4) left, top, width, height of the crop as fractions of the image
    brightness: Tensor  # (B,) factor
    contrast: Tensor  # (B,) factor
    saturation: Tensor  # (B,) factor
    hue: Tensor  # (B,) turns of the colour circle
    grayscale: Tensor  # (B,) bool
    order: Tensor  # (B,4) permutation of OPERATIONS

    @torch.no_grad()
    def apply(self, images: Tensor, size: int, finish: Finish = lambda image: image) -> Tensor:
        """Crop, flip and colour `images` (B,3,H,W), floats in [0,1] or bytes, to (B,3,size,size) in [0,1].

        `finish` is a last in-place operation on (...,3,H,W); on a CPU the image is then still in the CPU's cache.
        """
        with torch.autocast(images.device.type, enabled=False):  # 8 bits of mantissa would band the colours
            if images.device.type == "cpu":
                return _apply_one_by_one(images, self, size, finish)
            cropped = _crop(images.float() / 255 if images.dtype == torch.uint8 else images.float(), self, size)
            matrix, of_mean = colour_maps(self)
            shift = of_mean @ cropped.mean(dim=(2, 3))[:, :, None]  # (B,3,1)
            coloured = torch.baddbmm(shift, matrix, cropped.flatten(2))  # (B,3,size*size)
        return finish(coloured.clamp_(0, 1).unflatten(2, (size, size)))


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy to a device without waiting for its computations, as a plain `tensor.to(device)` does."""
    kind = torch.device(device).type
    if kind == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # without it the copy waits all the same
    # Apple's devices would read a tensor that may already be freed
    return tensor.to(device, non_blocking=kind != "mps")


def _apply_one_by_one(images: Tensor, draw: AugmentDraw, size: int, finish: Finish) -> Tensor:
    """The same on a CPU: each image stays in the CPU's cache through all operations, in a few shared buffers.

    Rows are resampled, then columns, as rows of the transposed image: a third of the time of `grid_sample`.
    """
    height, width = images.shape[2:]
    x, y = _positions(draw, size)
    (top, bottom, down), (left, right, across) = _neighbours(y, height), _neighbours(x, width)
    unit = 255 if images.dtype == torch.uint8 else 1
    matrix, of_mean = (each / unit for each in colour_maps(draw))
    result = torch.empty(len(images), 3, size, size)
    source, rows, turned = torch.empty(3, height, width), torch.empty(2, 3, size, width), torch.empty(3, width, size)
    columns = torch.empty(2, 3, size, size)
    lying, upright = rows[0].numpy().swapaxes(1, 2), columns[1].numpy().swapaxes(1, 2)
    for i, image in enumerate(images):
        source.copy_(image)
        torch.index_select(source, 1, top[i], out=rows[0])
        torch.index_select(source, 1, bottom[i], out=rows[1])
        torch.lerp(rows[0], rows[1], down[i], out=rows[0])
        np.copyto(turned.numpy(), lying)
        torch.index_select(turned, 1, left[i], out=columns[0])
        torch.index_select(turned, 1, right[i], out=columns[1])
        cropped = torch.lerp(columns[0], columns[1], across[i], out=columns[0]).flatten(1)  # (3,size*size)
        shift = of_mean[i] @ cropped.mean(dim=1)
        torch.addmm(shift[:, None], matrix[i], cropped, out=columns[1].view(3, -1))
        finish(columns[1].clamp_(0, 1))
        np.copyto(result[i].numpy(), upright)
    return result


def channels(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number per channel (C,), shaped (C,1,1) for images (B,C,H,W)."""
    return send(torch.tensor(values, dtype=dtype), device).view(-1, 1, 1)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """`(images - mean) / std` for each channel of `images` (B,C,H,W)."""
    centre, spread = (channels(each, images.device, images.dtype) for each in (mean, std))
    return (images - centre) / spread


def _boxes(augment: Augment, uniform: Tensor) -> Tensor:
    """RandomResizedCrop's rule on `uniform` (B,ATTEMPTS,4): the first box that fits a square image, else all of it."""
    area, shape, left, top = uniform.unbind(-1)  # (B,ATTEMPTS) each
    area = augment.scale[0] + (augment.scale[1] - augment.scale[0]) * area
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    ratio = torch.exp(low + (high - low) * shape)
    width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
    boxes = torch.stack((left * (1 - width), top * (1 - height), width, height), dim=-1)  # (B,ATTEMPTS,4)
    fits = (width <= 1) & (height <= 1)
    first = fits.int().argmax(dim=1)  # (B,)
    whole = torch.tensor((0.0, 0.0, 1.0, 1.0))
    return torch.where(fits.any(dim=1, keepdim=True), boxes[torch.arange(len(boxes)), first], whole)


def _positions(draw: AugmentDraw, size: int) -> tuple[Tensor, Tensor]:
    """Centres of the new pixels as fractions of the image: x and y, (B,size) each; mirrored for flipped images."""
    left, top, width, height = draw.box.float().unbind(1)  # (B,) each
    centres = (torch.arange(size, device=draw.box.device) + 0.5) / size  # (size,)
    x = left[:, None] + torch.outer(width, centres)
    return torch.where(draw.flip[:, None], x.flip(1), x), top[:, None] + torch.outer(height, centres)


def _neighbours(where: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two pixels around each position (B,size) along a side, and the weight of the second as (B,size,1)."""
    position = (where * length - 0.5).clamp(0, length - 1)
    first = position.floor()
    return first.long(), (first.long() + 1).clamp(max=length - 1), (position - first)[:, :, None]


def _crop(images: Tensor, draw: AugmentDraw, size: int) -> Tensor:
    x, y = _positions(draw, size)
    grid = torch.stack((x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)), dim=3)
    # grid_sample's coordinates run from -1 to 1 over the image's edges
    return functional.grid_sample(images, 2 * grid - 1, mode="bilinear", padding_mode="border", align_corners=False)


def colour_maps(draw: AugmentDraw) -> tuple[Tensor, Tensor]:
    """Maps (B,3,3) of a pixel and of the mean colour: a colour becomes ``first @ colour + second @ mean``.

    They are each image's colour operations, in its own order and grayscale last. Contrast blends with the mean gray,
    and the mean is transformed like any pixel: each operation is a linear map (6,6) of the pair (pixel, mean).
    """
    luma = send(torch.tensor(LUMA, dtype=draw.brightness.dtype), draw.brightness.device)
    gray = luma.expand(3, 3)  # maps a colour to its luma in all three channels
    eye = torch.eye(3, device=luma.device)
    brightness, contrast, saturation = (f.view(-1, 1, 1) for f in (draw.brightness, draw.contrast, draw.saturation))
    pixel = torch.stack(
        (brightness * eye, contrast * eye, saturation * eye + (1 - saturation) * gray, _hue_rotation(draw.hue)), dim=1
    )  # (B,4,3,3) in the order of OPERATIONS
    pair = luma.new_zeros(len(draw), len(OPERATIONS), 6, 6)
    pair[:, :, :3, :3] = pair[:, :, 3:, 3:] = pixel
    pair[:, OPERATIONS.index("contrast"), :, 3:] += (1 - contrast) * gray.repeat(2, 1)  # of pixel and mean alike
    first, second, third, fourth = pair[torch.arange(len(draw), device=luma.device)[:, None], draw.order].unbind(1)
    both = ((fourth @ third) @ (second @ first))[:, :3]  # (B,3,6)
    both = torch.where(draw.grayscale.view(-1, 1, 1), gray @ both, both)
    return both[:, :, :3].contiguous(), both[:, :, 3:].contiguous()


def _hue_rotation(turns: Tensor) -> Tensor:
    """(B,3,3) maps of RGB that turn chroma by `turns` (B,), red towards green, and keep luma and grays."""
    luma, red, blue = torch.tensor([LUMA, (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)], dtype=torch.float64)
    to_yuv = torch.stack((luma, 0.492 * (blue - luma), 0.877 * (red - luma)))  # (3,3), on the CPU for its inverse
    angle = 2 * math.pi * turns
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack((one, zero, zero, zero, cos, -sin, zero, sin, cos), dim=1).view(-1, 3, 3)
    back, there = (send(each.to(turn.dtype), turn.device) for each in (to_yuv.inverse(), to_yuv))
    return back @ turn @ there

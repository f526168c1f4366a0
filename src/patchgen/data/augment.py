"""Augmentation of a whole batch on its device, in two fused operations.

    draws = draw(Augment(), batch=96, generator=generator)     # every random number, on the CPU
    images = apply(pixels.float() / 255, draws.to(device), size=224)
    images = normalize(images, mean, std)

Crop and flip are one resampling; brightness, contrast, saturation, hue and grayscale are one 3x4 matrix an image. That
is a declared approximation of the usual chain (RandomResizedCrop, flip, ColorJitter, RandomGrayscale): boxes are drawn
for a square image and not rounded to pixels, hue turns the chroma plane of YUV instead of the HSV hexagon, values are
clamped once at the end instead of after every step, and the resampling has no antialias, so images should arrive near
the working size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

ATTEMPTS = 10  # of a crop, before the fallback to the centre
LUMA = (0.299, 0.587, 0.114)
OPERATIONS = ("brightness", "contrast", "saturation", "hue")  # `AugmentDraw.order` holds positions in this tuple


@dataclass(frozen=True)
class Augment:
    """Ranges of the random operations; the defaults are those of the SWAD / MIRO / GMDG lineage."""

    scale: tuple[float, float] = (0.7, 1.0)
    """Share of the image's area that a crop keeps."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width / height of a crop."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    brightness: float = 0.3
    """Factors are uniform in [1 - x, 1 + x]."""
    contrast: float = 0.3
    """Factors are uniform in [1 - x, 1 + x]."""
    saturation: float = 0.3
    """Factors are uniform in [1 - x, 1 + x]."""
    hue: float = 0.3
    """Turns of the colour circle are uniform in [-x, x]."""
    grayscale: float = 0.1
    """Probability of dropping all colour."""

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high < math.inf:
                raise ValueError(f"augment.{name} must be (low, high) with 0 < low <= high, got {(low, high)}")
        tops = dict.fromkeys(("flip", "grayscale"), 1.0) | {"hue": 0.5}
        for name in ("flip", "grayscale", *OPERATIONS):
            value, top = getattr(self, name), tops.get(name, math.inf)
            if not 0 <= value <= top or math.isinf(value):
                raise ValueError(f"augment.{name} must lie in [0, {top:g}], got {value}; 0 turns it off")

    def draw(self, batch: int, generator: torch.Generator) -> AugmentDraw:
        """The function `draw`, under the name that every kind of augmentation has."""
        return draw(self, batch, generator)


@dataclass(frozen=True)
class AugmentDraw:
    """The random numbers of a batch; index it with `[a:b]` or positions for a rank's share of the batch."""

    box: Tensor  # (B,4) left, top, width, height of the crop as fractions of the image
    flip: Tensor  # (B,) bool
    brightness: Tensor  # (B,) factor
    contrast: Tensor  # (B,) factor
    saturation: Tensor  # (B,) factor
    hue: Tensor  # (B,) turns of the colour circle
    grayscale: Tensor  # (B,) bool
    order: Tensor  # (B,4) permutation of OPERATIONS

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, part: slice | Tensor) -> AugmentDraw:
        if not isinstance(part, slice) and not (isinstance(part, Tensor) and part.ndim == 1):
            raise ValueError(f"a draw is indexed by [a:b] or a 1-d tensor of positions, got {part!r}")
        return AugmentDraw(**{field.name: getattr(self, field.name)[part] for field in fields(self)})

    def to(self, device: torch.device | str) -> AugmentDraw:
        """The same numbers on `device`."""
        return AugmentDraw(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def apply(self, images: Tensor, size: int) -> Tensor:
        """The function `apply`, under the name that every kind of draw has."""
        return apply(images, self, size)


def draw(augment: Augment, batch: int, generator: torch.Generator) -> AugmentDraw:
    """Draw every random number of a batch of `batch` images from a CPU `generator`.

    The amount drawn depends on `batch` alone, never on the values, so the generator's state after a step is the same
    for any `augment`.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator)

    def factor(strength: float) -> Tensor:
        low = max(0.0, 1 - strength)
        return low + (1 + strength - low) * uniform()

    return AugmentDraw(
        box=_boxes(augment, uniform(ATTEMPTS, 4)),
        flip=uniform() < augment.flip,
        brightness=factor(augment.brightness),
        contrast=factor(augment.contrast),
        saturation=factor(augment.saturation),
        hue=augment.hue * (2 * uniform() - 1),
        grayscale=uniform() < augment.grayscale,
        order=uniform(len(OPERATIONS)).argsort(dim=1),
    )


@torch.no_grad()
def apply(images: Tensor, draw: AugmentDraw, size: int) -> Tensor:
    """Crop, flip and colour `images` (B,3,H,W) in [0,1] to (B,3,size,size) in [0,1], as `draw` says."""
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise ValueError(
            f"images must be floats of shape (B,3,H,W), got {images.dtype} {tuple(images.shape)}; divide uint8 by 255"
        )
    if len(images) != len(draw):
        raise ValueError(f"{len(images)} images but {len(draw)} draws: slice the draw to the images with [a:b]")
    with torch.autocast(images.device.type, enabled=False):  # 8 bits of mantissa would band the colours
        cropped = _crop(images.float(), draw, size)
        matrix = colour_matrix(draw, cropped.mean(dim=(2, 3)))  # (B,3,4)
        coloured = torch.baddbmm(matrix[:, :, 3:], matrix[:, :, :3], cropped.flatten(2))  # (B,3,size*size)
    return coloured.clamp_(0, 1).unflatten(2, (size, size))


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """`(images - mean) / std` for each channel of `images` (B,C,H,W)."""
    centre = torch.as_tensor(mean, dtype=images.dtype, device=images.device).view(-1, 1, 1)
    spread = torch.as_tensor(std, dtype=images.dtype, device=images.device).view(-1, 1, 1)
    return (images - centre) / spread


def _boxes(augment: Augment, uniform: Tensor) -> Tensor:
    """RandomResizedCrop's rule on `uniform` (B,ATTEMPTS,4): the first box that fits a square image, else the centre."""
    area, shape, left, top = uniform.unbind(-1)  # (B,ATTEMPTS) each
    area = augment.scale[0] + (augment.scale[1] - augment.scale[0]) * area
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    ratio = torch.exp(low + (high - low) * shape)
    width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
    boxes = torch.stack((left * (1 - width), top * (1 - height), width, height), dim=-1)  # (B,ATTEMPTS,4)
    fits = (width <= 1) & (height <= 1)
    first = fits.int().argmax(dim=1)  # (B,)
    chosen = boxes[torch.arange(len(boxes)), first]
    return torch.where(fits.any(dim=1, keepdim=True), chosen, torch.tensor(_centre_box(augment)))


def _centre_box(augment: Augment) -> tuple[float, float, float, float]:
    """The largest centred box of a square image whose ratio is allowed."""
    ratio = min(max(1.0, augment.ratio[0]), augment.ratio[1])
    width, height = min(1.0, ratio), min(1.0, 1 / ratio)
    return (1 - width) / 2, (1 - height) / 2, width, height


def _crop(images: Tensor, draw: AugmentDraw, size: int) -> Tensor:
    """Resample each image's box, mirrored where it flips, to (B,3,size,size)."""
    left, top, width, height = draw.box.to(images.dtype).unbind(1)  # (B,) each
    zero = torch.zeros_like(left)
    mirrored = torch.where(draw.flip, -width, width)
    # grid_sample's coordinates run from -1 to 1 over the image's edges
    theta = torch.stack((mirrored, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1), dim=1)
    grid = functional.affine_grid(theta.view(-1, 2, 3), [len(images), 3, size, size], align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def colour_matrix(draw: AugmentDraw, mean: Tensor) -> Tensor:
    """Compose each image's colour operations, in its own order and grayscale last, to one affine map (B,3,4).

    Contrast moves towards the image's mean gray: `mean` (B,3), the image's mean colour, is taken through the operations
    before it, which is exact but for clamping.
    """
    luma = mean.new_tensor(LUMA)  # (3,)
    gray = luma.expand(3, 3)  # maps a colour to its luma in all three channels
    eye = torch.eye(3, dtype=mean.dtype, device=mean.device)
    brightness, contrast, saturation = (
        factor.to(mean.dtype).view(-1, 1, 1) for factor in (draw.brightness, draw.contrast, draw.saturation)
    )
    linear = torch.stack(
        (brightness * eye, contrast * eye, saturation * eye + (1 - saturation) * gray, _hue_rotation(draw.hue)),
        dim=1,
    )  # (B,4,3,3) in the order of OPERATIONS
    matrix, shift = eye.expand(len(mean), 3, 3), torch.zeros_like(mean)
    rows = torch.arange(len(mean), device=mean.device)
    for operation in draw.order.unbind(1):  # (B,) each
        step = linear[rows, operation]
        level = (torch.einsum("bij,bj->bi", matrix, mean) + shift) @ luma  # (B,) mean gray so far
        towards = torch.where(operation == OPERATIONS.index("contrast"), (1 - contrast.view(-1)) * level, 0.0)
        matrix, shift = step @ matrix, torch.einsum("bij,bj->bi", step, shift) + towards[:, None]
    affine = torch.cat((matrix, shift[:, :, None]), dim=2)
    return torch.where(draw.grayscale.view(-1, 1, 1), gray @ affine, affine)


def _hue_rotation(turns: Tensor) -> Tensor:
    """(B,3,3) maps of RGB that turn chroma by `turns` (B,), red towards green, and keep luma and grays."""
    luma, red, blue = torch.tensor([LUMA, (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)], dtype=torch.float64)
    to_yuv = torch.stack((luma, 0.492 * (blue - luma), 0.877 * (red - luma)))  # (3,3), on the CPU for its inverse
    angle = 2 * math.pi * turns
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack((one, zero, zero, zero, cos, -sin, zero, sin, cos), dim=1).view(-1, 3, 3)
    return to_yuv.inverse().to(turn) @ turn @ to_yuv.to(turn)

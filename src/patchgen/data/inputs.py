"""Images as passed by users (arrays, tensors, open images, paths, a folder, a Dataset) -> the inputs of a model."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchgen.data.image_files import list_images
from patchgen.data.images import BILINEAR, decode, square

FORMS = (
    "images are paths, PIL images, or arrays and tensors (H, W, 3), (3, H, W) or (H, W) of uint8 or of floats from 0 "
    "to 1; one of these, a list, a batch (N, H, W, 3), (N, 3, H, W) or (N, H, W), or a Dataset of such images"
)
PATHS = (str, os.PathLike)


def as_images(images: Any) -> Sequence[Any]:
    """A list of paths, PIL images and arrays from any form in `FORMS`, else ValueError; a folder is all its images."""
    if isinstance(images, PATHS):
        folder = Path(images)
        if not folder.is_dir():
            return [folder]
        if not (names := list_images(folder)):
            raise ValueError(f"the folder {folder} and its sub-folders hold no image")
        return [folder / name for name in names]
    if isinstance(images, Image.Image) or (_is_tensor(images) and images.ndim == 3 and images.shape[0] in (1, 3)):
        return [images]  # (C, H, W) is the layout of torch
    if is_dataset(images):
        images = ImagesOf(images)
    images = _as_array(images)
    if isinstance(images, np.ndarray) and images.dtype.kind not in "OUS":
        if images.ndim < 3 or (images.ndim == 3 and images.shape[2] == 3):
            return [images]
    elif not isinstance(images, Sequence | np.ndarray):
        raise ValueError(f"{FORMS}; got {type(images).__name__}")
    if not len(images):
        raise ValueError("there is no image: the array or list is empty")
    return images


@dataclass
class ImagesOf(Sequence[Any]):
    """The images of a Dataset, whose items are (image, ...) or the image itself."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        item = self.items[i]
        return item[0] if isinstance(item, tuple | list) else item


def is_dataset(data: Any) -> bool:
    """Whether the data is a torch `Dataset`, or behaves as one: items by number, and a length."""
    other = isinstance(data, (Sequence, np.ndarray, Image.Image, dict, *PATHS)) or hasattr(data, "columns")
    return not (other or _is_tensor(data)) and hasattr(type(data), "__getitem__") and hasattr(type(data), "__len__")


def _is_tensor(data: Any) -> bool:
    return hasattr(data, "detach")


def _as_array(data: Any) -> Any:
    return data.detach().cpu().numpy() if _is_tensor(data) else data


def squares(images: Any, size: int, interpolation: str = BILINEAR) -> Iterator[np.ndarray]:
    """(size, size, 3) uint8 of each image, in any form that `as_images` accepts."""
    for image in as_images(images):
        if isinstance(image, PATHS):
            yield decode(os.fspath(image), size, interpolation)
        else:
            yield square(opened(image), size, interpolation)


def opened(image: Any) -> Image.Image:
    """A PIL image from an input that is not a file."""
    if isinstance(image, Image.Image):
        return image
    pixels = _as_array(image)
    if not isinstance(pixels, np.ndarray):
        raise ValueError(f"{FORMS}; got {type(image).__name__}")
    form = f"{pixels.shape} {pixels.dtype}"
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)  # (C, H, W)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype.kind == "f" and pixels.size:
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= 1):  # also NaN
            raise ValueError(f"{FORMS}; got floats from {low:g} to {high:g}: undo the normalisation, or divide by 255")
        pixels = (255 * pixels).round().astype(np.uint8)
    if pixels.dtype != np.uint8 or not pixels.size or (pixels.ndim != 2 and pixels.shape[2:] != (3,)):
        raise ValueError(f"{FORMS}; got {form}")
    return Image.fromarray(np.ascontiguousarray(pixels))

"""Images as passed by users (arrays, open images, paths, a folder) -> the square inputs of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchgen.data.images import BILINEAR, decode, square
from patchgen.data.listing import list_images


def check_images(images: Any) -> Sequence[Any]:
    """Raise ValueError unless the input is (N, H, W, 3) uint8 or a list of paths or images."""
    if isinstance(images, np.ndarray) and images.dtype != object and images.dtype.kind not in "US":
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
            raise ValueError(f"an array of images must be (N, H, W, 3) uint8, got {images.shape} {images.dtype}")
    elif not isinstance(images, Sequence | np.ndarray):
        raise ValueError(f"images must be an array (N, H, W, 3) or a list, got {type(images).__name__}")
    if not len(images):
        raise ValueError("there is no image: the array or list is empty")
    return images


def squares(images: Any, size: int, interpolation: str = BILINEAR) -> Iterator[np.ndarray]:
    """(size, size, 3) uint8 of each image: arrays, paths, open images, or all files below a folder.

    Raises:
        UnreadableImage: a file is not an image.
    """
    if isinstance(images, (str, os.PathLike)):
        images = image_paths(images)
    for image in check_images(images):
        if isinstance(image, (str, os.PathLike)):
            yield decode(os.fspath(image), size, interpolation)
        else:
            yield square(opened(image), size, interpolation)


def image_paths(path: str | os.PathLike[str]) -> list[Path]:
    """The images below a folder in a fixed order, or the one file."""
    if not Path(path).is_dir():
        return [Path(path)]
    found = [Path(path) / name for name in list_images(Path(path))]
    if not found:
        raise ValueError(f"the folder {path} and its sub-folders hold no image")
    return found


def opened(image: Any) -> Image.Image:
    """A PIL image from an input that is not a file."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
        return Image.fromarray(image)
    kind = f"{image.shape} {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
    raise ValueError(f"an image must be a path, a PIL image or an array (H, W, 3) uint8, got {kind}")

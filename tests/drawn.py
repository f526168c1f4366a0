"""Random images, the same ones in every test."""

import torch
from torch import Tensor


def images(height: int, width: int | None = None) -> Tensor:
    return torch.randn(2, 3, height, width or height, generator=torch.Generator().manual_seed(1))

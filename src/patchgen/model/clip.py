"""Heads that compare images with sentences, or with vectors computed from sentences.

    text = load_text(backbone)
    model.head = ClipHead(text, Written(text.tower.read(["a photo of a dog.", "a photo of a cat."])), 2)

    logits = exp(scale) * cos(projection(x), t_c),    x the CLS token after the final norm, t_c the sentence of class c

The vision tower is the classifier's backbone and follows its tuning mode; the text tower is always frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.model.classifier import Saved
from patchgen.model.text import ClipText, TextTower

FIRST_DEVIATION = 0.02  # initial standard deviation of learned prompt vectors, as in CoOp


class Written(nn.Module):
    """Fixed sentences: encoded once, after which the text tower is not needed."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features: Tensor
        self.register_buffer("features", features.detach(), persistent=False)

    def forward(self) -> Tensor:
        """(C, E)"""
        return self.features


class Learned(nn.Module):
    """The same learned vectors before every class name, as in CoOp: [start] v_1 ... v_n name . [end]"""

    def __init__(self, tower: TextTower, names: Sequence[str], count: int) -> None:
        super().__init__()
        self.tower = tower
        self.vectors = nn.Parameter(FIRST_DEVIATION * torch.randn(count, tower.dim))
        self.ids: Tensor
        self.register_buffer("ids", tower.tokens([f"{name}." for name in names], room=count), persistent=False)
        self._read: tuple[Tensor, Tensor] | None = None  # last vectors encoded without gradients, and the result

    def forward(self) -> Tensor:
        """(C, E); without gradients, the tower runs only if the vectors have changed."""
        if torch.is_grad_enabled() and self.vectors.requires_grad:
            return self._texts()
        if self._read is None or not torch.equal(self._read[0], self.vectors):
            self._read = self.vectors.detach().clone(), self._texts().detach()
        return self._read[1]

    def _texts(self) -> Tensor:
        found: Tensor = self.tower(self.ids, self.vectors)
        return found


class ClassVectors(nn.Module):
    """Features (B, D) -> exp(scale) * <f, v_c> (B, C), with f the unit image vector and v_c one vector per class.

    Checkpoints contain the whole head, so a trained run predicts without the text tower.

    Args:
        projection: Of images, D -> E.
        scale: Logarithm of the factor on the products.
        vectors: (C, E), of any length.
        tuned: Whether the projection is trained.
    """

    def __init__(self, projection: nn.Linear, scale: Tensor, vectors: Tensor, *, tuned: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = projection.in_features, len(vectors)
        weight = projection.weight.detach().clone()
        self.weight = nn.Parameter(weight) if tuned else None
        constants = {"scale": scale, "vectors": vectors} | ({} if tuned else {"weight": weight})
        self.constants = Saved(constants)

    @classmethod
    def like(cls, saved: Mapping[str, Tensor]) -> ClassVectors:
        """A head with the shapes of a checkpoint's tensors, into which they are then loaded like any others."""
        tuned = "head.weight" in saved
        weight = saved["head.weight" if tuned else "head.constants.weight"]
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        return cls(projection, torch.zeros(()), torch.zeros_like(saved["head.constants.vectors"]), tuned=tuned)

    @property
    def vectors(self) -> Tensor:
        """(C, E)"""
        return self.constants["vectors"]

    @property
    def scale(self) -> Tensor:
        """Logarithm of the factor on the products."""
        return self.constants["scale"]

    def forward(self, features: Tensor) -> Tensor:
        weight = self.constants["weight"] if self.weight is None else self.weight
        with torch.autocast(features.device.type, enabled=False):
            image = F.normalize(features.float() @ weight.float().T, dim=-1)
            return self.scale.exp() * image @ self.vectors.T


class ClipHead(nn.Module):
    """Features (B, D) -> exp(scale) * cosine with each class's sentence (B, C).

    Args:
        text: Provides the projection and the scale.
        sentences: A module that returns the unit vectors (C, E).
        num_classes: C.
    """

    def __init__(self, text: ClipText, sentences: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = text.projection.in_features, num_classes
        self.projection = text.projection.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", text.scale.detach().clone(), persistent=False)
        self.sentences = sentences

    def forward(self, features: Tensor) -> Tensor:
        sentences = self.sentences().float()
        with torch.autocast(features.device.type, enabled=False):  # the scale is near 100: half precision would show
            image = F.normalize(self.projection(features.float()), dim=-1)
            return self.scale.exp() * image @ sentences.T

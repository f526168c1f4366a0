"""Calibrated probabilities by temperature scaling, and a flag for images unlike the training images.

    confidence = Confidence(temperature=1.7, familiar=Familiar(centres, whitening, threshold))
    confidence.probabilities(logits)            # (B, C) -> softmax(logits / temperature)
    confidence.familiar.distance(features)      # (B, D) -> (B,); above the threshold: unlike the training images

Both are fitted on source images (`patchgen.fit.calibrate`); a run folder has neither, and uses the plain softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Familiar:
    """The distribution of training features: class centres and one shared covariance; contains no images."""

    centres: Tensor  # (K, D) float32, the classes that training has seen, whitened
    whitening: Tensor  # (D, D) float32: features @ whitening have unit covariance within a class
    threshold: float  # a quantile of the distances of source validation

    def distance(self, features: Tensor) -> Tensor:
        """Mahalanobis distance (B,) of features (B, D) to the nearest class centre."""
        own = features.float().cpu() @ self.whitening
        return torch.cdist(own, self.centres, compute_mode="donot_use_mm_for_euclid_dist").amin(1)

    def unlike(self, features: Tensor) -> list[bool]:
        """True for features (B, D) whose distance exceeds the threshold."""
        return (self.distance(features) > self.threshold).tolist()


@dataclass(frozen=True, eq=False)
class Confidence:
    temperature: float = 1.0
    familiar: Familiar | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (B, C) -> calibrated probabilities (B, C)."""
        return (logits.float() / self.temperature).softmax(1)

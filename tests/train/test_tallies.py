"""Masks on the level that training left, counted while images are scored."""

from __future__ import annotations

import numpy as np
import torch

from patchgen.train.tallies import MaskTally


def test_means_over_images_by_hand_and_in_any_parts() -> None:
    truth = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=bool)
    mask = torch.tensor([[0.9, 0.1, 0.6, 0.2], [0.1, 0.7, 0.1, 0.1], [0.5, 0.4, 0.4, 0.4]])
    whole, parts = MaskTally(truth), MaskTally(truth)
    whole.add(np.arange(3), mask)
    parts.add(np.array([2]), mask[2:])
    parts.add(np.array([0, 1]), mask[:2])
    expected = {"iou": (1 / 3 + 0 + 1) / 3, "kept": (1 / 2 + 1) / 2}  # nothing is predictive in the second image
    assert whole.record() == parts.record() == expected


def test_nothing_is_said_of_no_images() -> None:
    assert MaskTally(np.ones((2, 4), dtype=bool)).record() == {}

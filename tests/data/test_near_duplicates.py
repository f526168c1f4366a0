"""Perceptual hashes: every near pair is found, against a slow comparison of all."""

from __future__ import annotations

import numpy as np
import pytest

from patchgen.data.doctor_files import DISTANCE, dhash, similar_pairs


def test_the_pairs_are_those_of_a_slow_comparison() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, (300, 2), dtype=np.uint64)
    for row, flips in enumerate(range(0, 20), 200):  # copies of the first rows, with 0 to 19 bits flipped
        bits = np.unpackbits(hashes[row - 200].view(np.uint8))
        bits[rng.choice(128, flips, replace=False)] ^= 1
        hashes[row] = np.packbits(bits).view(np.uint64)
    domain = rng.integers(0, 3, 300)
    apart = np.unpackbits((hashes[:, None] ^ hashes[None]).view(np.uint8), axis=2).sum(2)
    slow = [(i, j) for i in range(300) for j in range(i + 1, 300) if apart[i, j] <= DISTANCE and domain[i] != domain[j]]
    assert similar_pairs(hashes, domain) == slow and 3 < len(slow) < 9


def test_many_equal_hashes_take_no_quadratic_time() -> None:
    hashes = np.zeros((100_000, 2), np.uint64)
    hashes[:50_000, 0] = np.arange(50_000)
    domain = np.arange(100_000) % 4
    assert similar_pairs(hashes, domain)  # seconds; all pairs would be billions


@pytest.mark.parametrize("value", [0, 128, 255])
def test_a_flat_picture_has_no_hash(value: int) -> None:
    pixels = np.full((64, 64, 3), value, np.uint8)
    assert dhash(pixels) is None
    pixels[:32] = 255 - value if value != 128 else 0
    assert dhash(pixels) is not None

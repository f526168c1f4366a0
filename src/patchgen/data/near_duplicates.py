"""Near-duplicate images: a perceptual hash, and pairs of similar hashes in linear time.

    bits = dhash(pixels)                            # (S, S, 3) uint8 -> 128 bits as (2,) uint64, or None when flat
    similar_pairs(hashes, domain)                     # [(row, row)] of different domains, at most `DISTANCE` bits apart

The hash compares each pixel of a 9 x 9 thumbnail with its right and its lower neighbour: scaling, compression and
brightness hardly change it. Two hashes at most seven bits apart agree in at least one of eight bands of 16 bits, so
only rows that share a band are compared; within a band each row is compared with the `NEIGHBOURS` next ones.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

BANDS = 8  # of 16 bits each
DISTANCE = BANDS - 1  # bits: pairs within it share at least one band
NEIGHBOURS = 8
FLAT = 12  # range of gray levels in a thumbnail below which an image has no structure to compare


def dhash(pixels: np.ndarray) -> np.ndarray | None:
    """Pixels (S, S, 3) uint8 -> (2,) uint64; None for an image without structure, such as a blank tile."""
    small = Image.fromarray(pixels).convert("L").resize((9, 9), Image.Resampling.BOX)
    gray = np.asarray(small, dtype=np.int16)
    if int(gray.max()) - int(gray.min()) < FLAT:
        return None
    bits = np.stack([gray[:8, 1:] > gray[:8, :8], gray[1:, :8] > gray[:8, :8]])  # (2, 8, 8): right, lower
    return np.packbits(bits.reshape(2, 64), axis=1).view(np.uint64)[:, 0]


def similar_pairs(hashes: np.ndarray, domain: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of rows of different domains whose hashes are at most `DISTANCE` bits apart, each once.

    Args:
        hashes: (N, 2) uint64.
        domain: (N,) whole numbers.
    """
    _, rows = np.unique(np.column_stack([hashes, domain.astype(np.uint64)]), axis=0, return_index=True)
    found: set[tuple[int, int]] = set()
    bands = np.ascontiguousarray(hashes[rows]).view(np.uint16)  # (M, 8)
    for band in bands.T:
        order = np.lexsort((hashes[rows, 1], hashes[rows, 0], band))
        for step in range(1, min(NEIGHBOURS, len(rows) - 1) + 1):
            a, b = order[:-step], order[step:]
            near = (band[a] == band[b]) & (domain[rows[a]] != domain[rows[b]])
            a, b = rows[a[near]], rows[b[near]]
            close = np.bitwise_count(hashes[a] ^ hashes[b]).sum(1) <= DISTANCE
            found.update((min(i, j), max(i, j)) for i, j in zip(a[close].tolist(), b[close].tolist(), strict=True))
    return sorted(found)

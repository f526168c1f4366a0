"""The paper's theory, measured: every inequality with its bound, the measured value, and whether it holds.

    measure_oracle(sizes=(1, 4, 12, 36))["rows"]    # premises hold by construction; in each row of "broken" one fails
    measure_run("runs/4f2a9c01b7de")["rows"]        # a trained ViT: premises only approximate

The results concern an oracle subset C* and masks near it. None bounds the learned selector, and none says that training
finds C*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from patchgen.theory import bounds, oracle
from patchgen.theory.bounds import labelled, masked
from patchgen.theory.oracle import Encoder, Patches, Tick
from patchgen.theory.rows import BROKEN_SIZE, broken_rows, largest_norm, size_rows
from patchgen.theory.run import measure_run

__all__ = ["SIZES", "check_premises", "measure_oracle", "measure_run", "oracle_images"]
SIZES = (1, 4, 12, 36)
CELLS = oracle.LOCAL.classes * len(oracle.LOCAL.domains)


def measure_oracle(
    sizes: Sequence[int] = SIZES, images: int = 400, seed: int = 1, tick: Tick = lambda _: None
) -> dict[str, Any]:
    """All rows on the local oracle set at several s = |C*|, and rows of which each breaks one assumption.

    At each size, `images` are drawn for fitting, and as many again for measuring; `tick` is called after each.
    """
    per_class = _per_class(sizes, images, seed)
    encoder = oracle.fit_encoder(1000 * seed, tick)
    drawn = {size: _draw_both(size, per_class, seed, encoder, tick) for size in dict.fromkeys((*sizes, BROKEN_SIZE))}
    premises = {str(size): check_premises(*drawn[size]) for size in sizes}
    rows = [row for size in dict.fromkeys(sizes) for row in labelled(size_rows(*drawn[size], size, seed), size)]
    curve = {r.size: r.measured for r in rows if (r.quantity, r.case) == ("Rademacher complexity", "C*") and r.size}
    if len(curve) > 1:
        rows.append(bounds.scaling(list(curve), list(curve.values())))
    unsound = broken_rows(encoder, *drawn[BROKEN_SIZE], max(2, per_class // 2), seed, tick)
    return {"rows": [asdict(r) for r in rows], "broken": [asdict(r) for r in unsound], "premises": premises}


def oracle_images(sizes: Sequence[int], images: int, seed: int = 0) -> int:
    """The number of images that `measure_oracle` draws."""
    per_class = _per_class(sizes, images, seed)
    return oracle.encoder_images() + CELLS * (2 * per_class * len({*sizes, BROKEN_SIZE}) + max(2, per_class // 2))


def _per_class(sizes: Sequence[int], images: int, seed: int) -> int:
    """Images per domain and class; checks the arguments before anything is drawn."""
    if not sizes:
        raise ValueError(f"sizes needs at least one number of patches, 1..{oracle.PATCHES}")
    if images < 2 * CELLS:
        raise ValueError(f"images must be at least {2 * CELLS}, two of every class and domain; got {images}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    for size in sizes:
        oracle.local_spec(size, 1, 0)
    return images // CELLS


def _draw_both(size: int, per_class: int, seed: int, encoder: Encoder, tick: Tick) -> tuple[Patches, Patches]:
    """Images to fit heads on, and fresh ones, the same in every domain, to measure on."""
    train = oracle.draw(oracle.local_spec(size, per_class, 1000 * seed + 1), encoder, tick)
    return train, oracle.draw_coupled(oracle.local_spec(size, per_class, 1000 * seed + 2), encoder, tick)


def check_premises(train: Patches, test: Patches) -> dict[str, float]:
    """The premises, measured: largest |C*|, largest |z_p|, largest difference of Phi_C between domains."""
    phi = [masked(test.z, test.truth)[test.rows(name)] for name in test.domains]
    return {
        "largest |C*|": float(max(train.truth.sum(1).max(), test.truth.sum(1).max())),
        "largest |z_p|": largest_norm(train, test),
        "largest difference of Phi_C between domains": max(float(np.abs(phi[0] - other).max()) for other in phi[1:]),
    }

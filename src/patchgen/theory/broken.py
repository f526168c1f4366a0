"""The same inequalities with one assumption deliberately broken in each row: they must fail.

broken_rows(encoder, train, test, per_class=12, seed=1)     # each BoundCheck names its broken assumption in `premises`
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from patchgen.theory import bounds, oracle
from patchgen.theory.bounds import BoundCheck, masked
from patchgen.theory.oracle import BOUND, PATCHES, Encoder, Patches, Tick
from patchgen.theory.rows import (
    NORM,
    all_shift_rows,
    bayes_row,
    direction,
    domain_risks,
    fit_head,
    halves,
    pooled,
    select,
)

SIZE = 12  # s
UNDERSTATED = 1000.0


def broken_rows(
    encoder: Encoder, train: Patches, test: Patches, per_class: int, seed: int, tick: Tick = lambda _: None
) -> list[BoundCheck]:
    """At s = 12: the same functions, with inputs that the results exclude.

    Args:
        per_class: images of the further set whose style reaches C*, per domain and class.
    """
    spec = replace(oracle.local_spec(SIZE, per_class, 1000 * seed + 3), local=False)
    styled = oracle.draw_coupled(spec, encoder, tick)
    phi, fresh = masked(train.z, train.truth), masked(test.z, test.truth)
    head, noisy = fit_head(phi, train.label), oracle.noisy_mask(test.truth, seed)
    seen = halves(train.label)
    turned = (direction(phi, seen, NORM), seen, -halves(test.label))
    shifted = select("shifted", test, oracle.shifted_mask(test.truth))
    scale = head.lipschitz * BOUND * PATCHES

    def summed(mask: np.ndarray) -> np.ndarray:
        return PATCHES**0.5 * pooled(masked(test.z, mask))

    unsound = {
        "sufficiency: C* is replaced by the other patches": bayes_row(
            train, test, ~train.truth, ~test.truth, "the patches outside C*"),
        "|z_p| <= B: features are three times as long": bounds.complexity(
            3 * phi, NORM, BOUND, SIZE, "C*", seed),
        "|C*| <= s: s is given as 1": bounds.complexity(phi, NORM, BOUND, 1, "C*", seed),
        "one law for sample and risk: fresh labels are turned round": bounds.generalization(
            phi, fresh, [turned], NORM, BOUND, SIZE, "C*"),
        "G non-expansive: the plain sum over the patches": bounds.mask_stability(
            summed(noisy), summed(test.truth), noisy, test.truth, BOUND, "noisy, G = sum")[0],
        "L: the head is a thousand times steeper than L says": bounds.risk_deviation(
            domain_risks(test, shifted, head), scale / UNDERSTATED, "shifted"),
        "one law of (Phi_C, Y): style reaches C*": bounds.two_domains(
            domain_risks(styled, select("true mask", styled, styled.truth), head), scale, "true mask"),
        **_broken_separation(test, seed),
        "one law of (Phi_C, Y), unknown class present: style reaches C*": all_shift_rows(
            train, styled, select("true mask, G = pooled", styled, styled.truth.astype(float), pooled))[0],
    }  # fmt: skip
    return [replace(row, size=SIZE, premises=f"broken: {what}") for what, row in unsound.items()]


def _broken_separation(test: Patches, seed: int) -> dict[str, BoundCheck]:
    """A small mean error instead of one that bounds every sample."""
    few = select("right for 97 %, G = pooled", test, oracle.mostly_right_mask(test.truth, seed), pooled)
    eta = float(np.linalg.norm(few.learned - few.oracle, axis=1).mean())
    q = bounds.mask_error(few.mask, test.truth) * PATCHES
    args = few.learned, few.oracle, test.label
    return {
        "eta bounds every sample: its mean is used": bounds.separation(*args, eta, few.name),
        "q bounds every sample: its mean is used": bounds.separation(*args, BOUND * q, few.name, "Cor. C.2", "Bq"),
    }

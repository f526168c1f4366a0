"""The paper's inequalities, by its numbers in brackets: the measured value, the bound, and whether it holds.

z (N,P,d) are patch representations with norms at most B (`bound`), m (N,P) in [0,1] a mask, `masked` is
Phi_m = vec(m_1 z_1, ..., m_P z_P). Heads have norms at most Lambda = 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

Sense = Literal["at most", "at least"]
Status = Literal["holds", "vacuous", "violated"]
ROUNDING = 1e-9  # tolerance for equal numbers in float64, relative to 1 or to the bound
DELTA = 0.05  # the confidence bounds hold with probability 1 - DELTA
DRAWS = 400  # of the random signs in a Rademacher complexity
SLOPE_TOLERANCE = 0.1  # ours: the paper bounds complexities and states no slope


@dataclass(frozen=True)
class BoundCheck:
    """One inequality, measured."""

    result: str  # the paper's number
    quantity: str
    case: str  # which mask, which map G, which representation
    measured: float
    bound: float
    sense: Sense
    status: Status
    tightness: float | None  # 1 = attained; measured / bound, for "at least" bound / measured
    size: int | None = None  # s
    premises: str = "hold"
    note: str = ""


def judge(
    result: str, quantity: str, case: str, measured: float, bound: float,
    sense: Sense = "at most", trivial: float | None = None, note: str = "",
) -> BoundCheck:  # fmt: skip
    """A row with its verdict; a bound no better than the `trivial` one is vacuous."""
    slack = bound - measured if sense == "at most" else measured - bound
    says_nothing = trivial is not None and (bound >= trivial if sense == "at most" else bound <= trivial)
    violated = not slack >= -ROUNDING * max(1.0, abs(bound))  # so written, a nan is a violation
    status: Status = "violated" if violated else "vacuous" if says_nothing else "holds"
    small, large = (measured, bound) if sense == "at most" else (bound, measured)
    tightness = small / large if large > 0 and small >= 0 else None
    return BoundCheck(result, quantity, case, float(measured), float(bound), sense, status, tightness, note=note)


def tightest(rows: list[BoundCheck]) -> BoundCheck:
    """The row with the least room; a bound of zero has none."""
    return max(rows, key=lambda row: (row.status == "violated", row.measured / max(row.bound, 1e-12)))


def masked(z: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Phi_m: (N,P,d) and (N,P) -> (N,P*d)."""
    return (z * mask[:, :, None]).reshape(len(z), -1)


# Proposition 3.1 and Corollary C.1


def equal_bayes_risk(wrong_subset: np.ndarray, wrong_all: np.ndarray, classes: int, case: str) -> BoundCheck:
    """[3.1] The Bayes risks from C* and from all patches are equal, from errors (N,) of a rule fitted on each.

    The larger error limits the difference of the risks: equality is shown only if BOTH are within the sampling error
    (Hoeffding, 1 - DELTA), errors that differ by more contradict it, and two equally bad rules show nothing.
    """
    subset, everything = float(wrong_subset.mean()), float(wrong_all.mean())
    worst, allowed = max(subset, everything), math.sqrt(2 * math.log(2 / DELTA) / len(wrong_all))
    errors = f"held-out error {subset:.3f} from C*, {everything:.3f} from all"
    note = f"{errors}, N = {len(wrong_all)}; bound = sampling error"
    row = judge("Prop. 3.1", "difference of Bayes risks, at most", case, worst, allowed, note=note)
    shown = worst <= allowed < 1 - 1 / classes
    return replace(row, status="violated" if abs(subset - everything) > allowed else "holds" if shown else "vacuous")


def rademacher(phi: np.ndarray, seed: int) -> tuple[float, float]:
    """Empirical complexity of {x -> <v, phi(x)> : |v| <= 1}, the mean of |sum_i sigma_i phi_i| / n, and its error."""
    signs = np.random.default_rng([seed, 11]).choice([-1.0, 1.0], (DRAWS, len(phi)))
    values = np.linalg.norm(signs @ phi, axis=1) / len(phi)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(DRAWS))


def complexity(phi: np.ndarray, bound: float, size: int, case: str, seed: int) -> BoundCheck:
    """[3.1] The empirical Rademacher complexity is at most Lambda B sqrt(s / n); `size` is s for C*, P for all."""
    measured, error = rademacher(phi, seed)
    note = f"Lambda = 1, B = {bound:.4g}, n = {len(phi)}; standard error {error:.2g}"
    limit = bound * math.sqrt(size / len(phi))
    return judge("Prop. 3.1", "Rademacher complexity", case, measured, limit, note=note)


def scaling(sizes: list[int], complexities: list[float]) -> BoundCheck:
    """[3.1] How the measured complexity of C* grows with s: the bound grows as s^(1/2)."""
    slope = float(np.polyfit(np.log(sizes), np.log(complexities), 1)[0])
    note = f"measured exponent {slope:.3f}; a comparison with the bound's sqrt(s), the tolerance is ours"
    what, distance = "exponent of s, distance from 1/2", abs(slope - 0.5)
    return judge("Prop. 3.1", what, "C*", distance, SLOPE_TOLERANCE, trivial=0.5, note=note)


def ramp(score: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Loss in [0,1], 1-Lipschitz in the score (rho = 1): 0 from a margin of 1 on."""
    return np.clip(1 - sign * score, 0, 1)


Task = tuple[np.ndarray, np.ndarray, np.ndarray]  # head (F,), signs of the sample (n,), fresh signs (N,)


def generalization(
    train: np.ndarray, test: np.ndarray, tasks: Sequence[Task], bound: float, size: int, case: str
) -> BoundCheck:
    """[Cor. C.1] R - R_hat <= 2 rho Lambda B sqrt(s / n) + 3 sqrt(log(2 / delta) / (2 n)); the widest of all heads."""
    n = len(train)
    gaps = [float(ramp(test @ v, fresh).mean() - ramp(train @ v, seen).mean()) for v, seen, fresh in tasks]
    limit = 2 * bound * math.sqrt(size / n) + 3 * math.sqrt(math.log(2 / DELTA) / (2 * n))
    note = f"rho = 1, Lambda = 1, n = {n}, delta = {DELTA:g}; gaps {', '.join(f'{gap:.3f}' for gap in gaps)}"
    return judge("Cor. C.1", "true minus empirical risk", case, max(gaps), limit, trivial=1.0, note=note)


# Lemmas C.1 and C.2, Proposition 3.2


def mask_stability(
    learned: np.ndarray, oracle: np.ndarray, mask: np.ndarray, truth: np.ndarray, bound: float, case: str
) -> list[BoundCheck]:
    """[Lemma C.1] |G(Phi_m) - G(Phi_m*)| <= B |m - m*|_2 <= B |m - m*|_1, as the largest ratio over the images."""
    moved, off = np.linalg.norm(learned - oracle, axis=1), np.abs(mask - truth)
    rows = []
    for name, error in (("2", np.linalg.norm(off, axis=1)), ("1", off.sum(1))):
        ratio = np.divide(moved, error, out=np.zeros_like(moved), where=error > 0)
        rows.append(judge("Lemma C.1", f"change of representation / |m - m'|_{name}", case, ratio.max(), bound))
    return rows


class Head(NamedTuple):
    """A fixed linear classifier with the loss 1 - p(y), which lies in [0,1]."""

    weight: np.ndarray  # (C,F)
    bias: np.ndarray  # (C,)

    @property
    def lipschitz(self) -> float:
        """L of u -> 1 - p(y|u): its gradient is p_y sum_c p_c (w_y - w_c), at most max |w_c - w_c'| / 4 long."""
        return max(float(np.linalg.norm(a - b)) for a, b in combinations(self.weight, 2)) / 4

    def loss(self, u: np.ndarray, label: np.ndarray) -> np.ndarray:
        logits = u @ self.weight.T + self.bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        return 1 - shares[np.arange(len(label)), label] / shares.sum(1)


class DomainRisk(NamedTuple):
    """What Lemma C.2 and Proposition 3.2 need to know of one domain."""

    learned: float  # R_d(h, phi)
    oracle: float  # R_d(h, C)
    epsilon: float  # mean of |m - m*|_1 / P


def risk_deviation(risks: dict[str, DomainRisk], scale: float, case: str) -> BoundCheck:
    """[Lemma C.2] |R_d(phi) - R_d(C)| <= L B P epsilon_d in the domain that comes nearest; `scale` is L B P."""
    rows = []
    for name, risk in risks.items():
        note = f"in {name}; epsilon {risk.epsilon:.4f}, L B P {scale:.3g}"
        gap, limit = abs(risk.learned - risk.oracle), scale * risk.epsilon
        rows.append(judge("Lemma C.2", "risk, learned minus oracle mask", case, gap, limit, trivial=1.0, note=note))
    return tightest(rows)


def two_domains(risks: dict[str, DomainRisk], scale: float, case: str, result: str = "Prop. 3.2") -> BoundCheck:
    """[3.2] |R_d(phi) - R_d'(phi)| <= L B P (epsilon_d + epsilon_d') for the pair that comes nearest."""
    rows = []
    for (a, first), (b, second) in combinations(risks.items(), 2):
        note = f"{a} and {b}; oracle risks differ by {abs(first.oracle - second.oracle):.2g}, L B P {scale:.3g}"
        gap, limit = abs(first.learned - second.learned), scale * (first.epsilon + second.epsilon)
        rows.append(judge(result, "risk between two domains", case, gap, limit, trivial=1.0, note=note))
    return tightest(rows)


# Proposition 3.3 and Corollary C.2


def separation(
    learned: np.ndarray, oracle: np.ndarray, label: np.ndarray, eta: float, case: str,
    result: str = "Prop. 3.3", error: str = "eta",
) -> BoundCheck:  # fmt: skip
    """[3.3] Learned representations of distinct classes are at least gamma - 2 (r + eta) apart; 0 is trivial.

    gamma is the smallest distance of two class means of `oracle`, r the largest of a sample from its own; `eta` bounds
    |learned - oracle| for EVERY sample; it is B q for [Cor. C.2].
    """
    from scipy.spatial.distance import cdist, pdist

    names = np.unique(label)
    centres = np.stack([oracle[label == c].mean(0) for c in names])
    radius = float(np.linalg.norm(oracle - centres[np.searchsorted(names, label)], axis=1).max())
    gamma = float(pdist(centres).min())
    note, limit = f"gamma {gamma:.3g}, r {radius:.3g}, {error} {eta:.3g}", gamma - 2 * (radius + eta)
    classes = [learned[label == c] for c in names]
    measured = min(float(cdist(a, b).min()) for a, b in combinations(classes, 2))
    return judge(result, "distance between classes", case, measured, limit, "at least", trivial=0.0, note=note)

"""From patch representations and masks to rows: each inequality with a mask, a map G and a fitted head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from patchgen.theory import bounds, oracle
from patchgen.theory.bounds import BoundCheck, DomainRisk, Head, masked
from patchgen.theory.oracle import BOUND, PATCHES, Encoder, Patches, Tick

NORM = 1.0  # Lambda, the same for C* and for all patches
BROKEN_SIZE = 12  # s of the rows that must fail
UNDERSTATED = 1000.0  # times that L is too small there
Map = Callable[[np.ndarray], np.ndarray]  # G: (N,P*d) -> (N,g)


@dataclass(frozen=True, eq=False)
class Selection:
    """A mask with its representations, and those of C*."""

    name: str
    mask: np.ndarray  # (N,P)
    learned: np.ndarray  # (N,g)  G(Phi_m)
    oracle: np.ndarray  # (N,g)  G(Phi_C)


def identity(phi: np.ndarray) -> np.ndarray:
    return phi


def pooled(phi: np.ndarray) -> np.ndarray:
    """The sum over the patches over sqrt(P), a non-expansive map that ignores positions."""
    return phi.reshape(len(phi), PATCHES, -1).sum(1) / PATCHES**0.5


def select(name: str, test: Patches, mask: np.ndarray, G: Map = identity) -> Selection:
    return Selection(name, mask.astype(float), G(masked(test.z, mask)), G(masked(test.z, test.truth)))


def size_rows(train: Patches, test: Patches, size: int, seed: int) -> list[BoundCheck]:
    """Every row at one s, with masks of known error and G = identity; separation also with G = pooled."""
    rows = subset_rows(train, test, size, BOUND, seed)
    head = fit_head(masked(train.z, train.truth), train.label)
    noisy = oracle.noisy_mask(test.truth, seed)
    masks = {"true mask": test.truth.astype(float), "noisy": noisy, "shifted": oracle.shifted_mask(test.truth)}
    if size == PATCHES:
        del masks["shifted"]  # shifting everything changes nothing
    for name, mask in masks.items():
        rows += shift_rows(test, select(name, test, mask), head, BOUND)
    for G in (identity, pooled):
        rows += separation_rows(test, select(f"noisy, G = {G.__name__}", test, noisy, G), BOUND)
    return rows + all_shift_rows(train, test, select("noisy, G = pooled", test, noisy, pooled))


def subset_rows(train: Patches, test: Patches, size: int, bound: float, seed: int) -> list[BoundCheck]:
    """[3.1, Cor. C.1] C* against all patches."""
    rows = [bayes_row(train, test, train.truth, test.truth, "C*")]
    count, everything = train.truth.shape[1], np.ones_like
    subsets = {"C*": (train.truth, test.truth, size), "all": (everything(train.truth), everything(test.truth), count)}
    for name, (here, there, s) in subsets.items():
        rows.append(bounds.complexity(masked(train.z, here), NORM, bound, s, name, seed))
        rows.append(generalization_row(train, test, here, there, s, bound, name, seed))
    return rows


def shift_rows(test: Patches, chosen: Selection, head: Head, bound: float) -> list[BoundCheck]:
    """[Lemma C.1, Lemma C.2, 3.2] Of one mask."""
    scale, risks = head.lipschitz * bound * chosen.mask.shape[1], domain_risks(test, chosen, head)
    rows = [bounds.two_domains(risks, scale, chosen.name)]
    if (chosen.mask == test.truth).all():
        return rows
    stable = bounds.mask_stability(chosen.learned, chosen.oracle, chosen.mask, test.truth, bound, chosen.name)
    return [*stable, bounds.risk_deviation(risks, scale, chosen.name), *rows]


def separation_rows(test: Patches, chosen: Selection, bound: float) -> list[BoundCheck]:
    """[3.3, Cor. C.2] With the measured eta, and with the eta that the mask's largest error implies."""
    eta, q = largest_move(chosen), float(np.abs(chosen.mask - test.truth).sum(1).max())
    args = chosen.learned, chosen.oracle, test.label
    return [
        bounds.separation(*args, eta, chosen.name),
        bounds.separation(*args, bound * q, chosen.name, "Cor. C.2", "Bq"),
    ]


def all_shift_rows(train: Patches, test: Patches, chosen: Selection) -> list[BoundCheck]:
    """[Cor. 3.1] Both at once: the last class is unknown to the head, and the domains differ in their context.

    The risk speaks of the known classes, the separation of all; there is no bound on the two together.
    """
    unknown = int(test.label.max())
    old, known = train.label != unknown, test.label != unknown
    head = fit_head(pooled(masked(train.z[old], train.truth[old])), train.label[old])
    part = Selection(chosen.name, chosen.mask[known], chosen.learned[known], chosen.oracle[known])
    return componentwise(test.only(known), part, test, chosen, head, BOUND)


def componentwise(
    known: Patches, of_known: Selection, test: Patches, chosen: Selection, head: Head, bound: float
) -> list[BoundCheck]:
    """[Cor. 3.1] The risk component on images of known classes and the separation component on all."""
    scale, eta = head.lipschitz * bound * chosen.mask.shape[1], largest_move(chosen)
    return [
        bounds.two_domains(domain_risks(known, of_known, head), scale, chosen.name, "Cor. 3.1"),
        bounds.separation(chosen.learned, chosen.oracle, test.label, eta, chosen.name, "Cor. 3.1"),
    ]


def largest_move(chosen: Selection) -> float:
    """eta: the largest |learned - oracle| over the samples."""
    return float(np.linalg.norm(chosen.learned - chosen.oracle, axis=1).max())


def domain_risks(test: Patches, chosen: Selection, head: Head) -> dict[str, DomainRisk]:
    """R_d with the mask and with C*, and epsilon_d, of every domain."""
    learned, true = (head.loss(u, test.label) for u in (chosen.learned, chosen.oracle))
    risks = {}
    for name in test.domains:
        rows = test.rows(name)
        error = bounds.mask_error(chosen.mask[rows], test.truth[rows])
        risks[name] = DomainRisk(float(learned[rows].mean()), float(true[rows].mean()), error)
    return risks


# Fitted rules


def fit_head(u: np.ndarray, label: np.ndarray) -> Head:
    """Plain logistic regression."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=500).fit(u, label)
    return Head(model.coef_, model.intercept_)


def direction(phi: np.ndarray, sign: np.ndarray, norm: float) -> np.ndarray:
    """A head of the class {|v| <= norm}: the direction of a logistic regression without intercept."""
    from sklearn.linear_model import LogisticRegression

    unit = phi / np.linalg.norm(phi, axis=1).mean()  # the regularisation then means the same for every B and s
    v = LogisticRegression(fit_intercept=False, max_iter=1000).fit(unit, sign).coef_[0]
    return norm * v / max(float(np.linalg.norm(v)), 1e-12)


def generalization_row(
    train: Patches, test: Patches, here: np.ndarray, there: np.ndarray, size: int, bound: float, case: str, seed: int
) -> BoundCheck:
    """[Cor. C.1] Of a head for the first half of the classes, and of one that learned coin flips by heart.

    The corollary holds for every law; where labels are coin flips all that a head learns is the sample.
    """
    phi, fresh, coin = masked(train.z, here), masked(test.z, there), np.random.default_rng([seed, 14])
    signs = [(halves(train.label), halves(test.label))]
    signs.append((coin.choice([-1.0, 1.0], len(phi)), coin.choice([-1.0, 1.0], len(fresh))))
    tasks = [(direction(phi, seen, NORM), seen, new) for seen, new in signs]
    return bounds.generalization(phi, fresh, tasks, NORM, bound, size, case)


def halves(label: np.ndarray) -> np.ndarray:
    """Labels as a two-class task: 1 for the first half of the classes, -1 for the rest."""
    return np.where(label <= label.max() // 2, 1.0, -1.0)


def bayes_row(train: Patches, test: Patches, here: np.ndarray, there: np.ndarray, case: str) -> BoundCheck:
    """[3.1] Errors of rules fitted on a subset and on all patches, in the domain where equality is least certain."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    wrong = []
    for fit, use in ((here, there), (np.ones_like(here), np.ones_like(there))):
        rule = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        rule.fit(summary(train.z, fit), train.label)
        wrong.append(rule.predict(summary(test.z, use)) != test.label)
    subset, everything = wrong
    classes, parts = len(np.unique(test.label)), {name: test.rows(name) for name in test.domains}
    return bounds.tightest(
        [bounds.equal_bayes_risk(subset[p], everything[p], classes, f"{case}, {name}") for name, p in parts.items()]
    )


def summary(z: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What a rule needs of a set of patches whose places do not matter: mean and maximum of each feature, (N,2d)."""
    chosen = z * mask[:, :, None]
    mean = chosen.sum(1) / np.maximum(mask.sum(1), 1)[:, None]
    return np.concatenate([mean, np.where(mask[:, :, None], z, -np.inf).max(1)], axis=1)


def largest_norm(*parts: Patches) -> float:
    """B as measured: the largest |z_p|."""
    return max(float(np.linalg.norm(part.z, axis=2).max()) for part in parts)


# The same inequalities with one assumption deliberately broken in each row: they must fail


def broken_rows(
    encoder: Encoder, train: Patches, test: Patches, per_class: int, seed: int, tick: Tick = lambda _: None
) -> list[BoundCheck]:
    """At s = 12: the same functions, with inputs that the results exclude.

    The set whose style reaches C* has `per_class` images per domain and class.
    """
    spec = replace(oracle.local_spec(BROKEN_SIZE, per_class, 1000 * seed + 3), local=False)
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
            3 * phi, NORM, BOUND, BROKEN_SIZE, "C*", seed),
        "|C*| <= s: s is given as 1": bounds.complexity(phi, NORM, BOUND, 1, "C*", seed),
        "one law for sample and risk: fresh labels are turned round": bounds.generalization(
            phi, fresh, [turned], NORM, BOUND, BROKEN_SIZE, "C*"),
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
    return [replace(row, size=BROKEN_SIZE, premises=f"broken: {what}") for what, row in unsound.items()]


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

"""Each inequality with a mask, a map G and a fitted head: on oracle images, where premises hold, and on a run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.theory import bounds, oracle
from patchgen.theory.bounds import BoundCheck, DomainRisk, Head, masked
from patchgen.theory.oracle import BOUND, LOCAL, PATCHES, Encoder, Patches, draw, local_spec

if TYPE_CHECKING:
    from patchgen.predict.fold_runs import Subject

SIZES = (1, 4, 12, 36)
CELLS = LOCAL.classes * len(LOCAL.domains)
BROKEN_SIZE = 12  # s of the rows that must fail
UNDERSTATED = 1000.0  # times that L is too small there
BATCH = 32
Tick = Callable[[int], object]
Map = Callable[[np.ndarray], np.ndarray]  # G: (N,P*d) -> (N,g)


@dataclass(frozen=True, eq=False)
class Selection:
    """A mask of some patches, with the representations under it and under C*."""

    name: str
    patches: Patches
    mask: np.ndarray  # (N,P)
    learned: np.ndarray  # (N,g)  G(Phi_m)
    oracle: np.ndarray  # (N,g)  G(Phi_C)

    @property
    def eta(self) -> float:
        """The largest |learned - oracle| over the samples."""
        return float(np.linalg.norm(self.learned - self.oracle, axis=1).max())

    def risks(self, head: Head) -> dict[str, DomainRisk]:
        """On the images of the classes that the head knows, the first."""
        patches, of = self.patches, self.patches.label < len(head.bias)
        learned, true = (head.loss(u[of], patches.label[of]) for u in (self.learned, self.oracle))
        values = np.column_stack([learned, true, np.abs(self.mask - patches.truth).mean(1)[of]])
        return {name: DomainRisk(*values[patches.rows(name)[of]].mean(0).tolist()) for name in patches.domains}

    def separation(self, eta: float, result: str = "Prop. 3.3", error: str = "eta") -> BoundCheck:
        return bounds.separation(self.learned, self.oracle, self.patches.label, eta, self.name, result, error)


def pooled(phi: np.ndarray) -> np.ndarray:
    """The sum over the patches over sqrt(P), a non-expansive map that ignores positions."""
    return phi.reshape(len(phi), PATCHES, -1).sum(1) / PATCHES**0.5


G_MAPS: dict[str, Map] = {"identity": lambda phi: phi, "pooled": pooled}


def select(name: str, test: Patches, mask: np.ndarray, G: Map = G_MAPS["identity"]) -> Selection:
    return Selection(name, test, mask.astype(float), G(masked(test.z, mask)), G(masked(test.z, test.truth)))


# Oracle images


def check_arguments(sizes: Sequence[int], images: int, seed: int) -> int:
    """ValueError for arguments of `measure_oracle` that are out of range; returns how often it ticks."""
    if not sizes:
        raise ValueError(f"sizes needs at least one number of patches, 1..{PATCHES}")
    if images < 2 * CELLS:
        raise ValueError(f"images must be at least {2 * CELLS}, two of every class and domain; got {images}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    for size in sizes:
        local_spec(size, 1, 0)
    return 2 + len({*sizes, BROKEN_SIZE})


def measure_oracle(
    sizes: Sequence[int] = SIZES, images: int = 400, seed: int = 1, tick: Tick = lambda _: None
) -> dict[str, Any]:
    """All rows on the local oracle set at several s = |C*|, and rows of which each breaks one assumption."""
    check_arguments(sizes, images, seed)
    per_class = images // CELLS  # of each domain and class
    encoder = oracle.fit_encoder(1000 * seed)
    tick(1)
    rows = []
    for size in dict.fromkeys((*sizes, BROKEN_SIZE)):
        train = draw(local_spec(size, per_class, 1000 * seed + 1), encoder)
        test = draw(local_spec(size, per_class, 1000 * seed + 2), encoder, couple=True)
        if size in sizes:
            rows += [replace(row, size=size) for row in size_rows(train, test, size, seed)]
        if size == BROKEN_SIZE:
            broken = broken_rows(encoder, train, test, max(2, per_class // 2), seed)
            tick(1)
        tick(1)
    curve = {r.size: r.measured for r in rows if (r.quantity, r.case) == ("Rademacher complexity", "C*") and r.size}
    if len(curve) > 1:
        rows.append(bounds.scaling(list(curve), list(curve.values())))
    return {"rows": [asdict(row) for row in rows], "broken": [asdict(row) for row in broken]}


def size_rows(train: Patches, test: Patches, size: int, seed: int) -> list[BoundCheck]:
    """Every row at one s, with masks of known error and G = identity; separation also with G = pooled."""
    rows = subset_rows(train, test, size, BOUND, seed)
    head = fit_head(masked(train.z, train.truth), train.label)
    noisy = oracle.noisy_mask(test.truth, seed)
    masks = {"true mask": test.truth.astype(float), "noisy": noisy, "shifted": oracle.shifted_mask(test.truth)}
    if size == PATCHES:
        del masks["shifted"]  # shifting everything changes nothing
    for name, mask in masks.items():
        rows += shift_rows(select(name, test, mask), head, BOUND)
    for name, G in G_MAPS.items():
        rows += separation_rows(select(f"noisy, G = {name}", test, noisy, G), BOUND)
    return rows + all_shift_rows(train, select("noisy, G = pooled", test, noisy, pooled))


def subset_rows(train: Patches, test: Patches, size: int, bound: float, seed: int) -> list[BoundCheck]:
    """[3.1, Cor. C.1] C* against all patches."""
    rows = [bayes_row(train, test, train.truth, test.truth, "C*")]
    every = np.ones_like(train.truth), np.ones_like(test.truth)
    for name, (here, there), s in (("C*", (train.truth, test.truth), size), ("all", every, train.truth.shape[1])):
        rows.append(bounds.complexity(masked(train.z, here), bound, s, name, seed))
        rows.append(generalization_row(train, test, here, there, s, bound, name, seed))
    return rows


def shift_rows(selection: Selection, head: Head, bound: float) -> list[BoundCheck]:
    """[Lemma C.1, Lemma C.2, 3.2] Of one mask."""
    scale, risks = head.lipschitz * bound * selection.mask.shape[1], selection.risks(head)
    rows = [bounds.two_domains(risks, scale, selection.name)]
    if (selection.mask == selection.patches.truth).all():
        return rows
    s = selection
    moved = bounds.mask_stability(s.learned, s.oracle, s.mask, s.patches.truth, bound, s.name)
    return [*moved, bounds.risk_deviation(risks, scale, s.name), *rows]


def separation_rows(selection: Selection, bound: float) -> list[BoundCheck]:
    """[3.3, Cor. C.2] With the measured eta, and with the eta that the mask's largest error implies."""
    q = float(np.abs(selection.mask - selection.patches.truth).sum(1).max())
    return [selection.separation(selection.eta), selection.separation(bound * q, "Cor. C.2", "Bq")]


def all_shift_rows(train: Patches, selection: Selection) -> list[BoundCheck]:
    """[Cor. 3.1] Both at once: the last class is unknown to the head, and the domains differ in their context."""
    old = train.label != selection.patches.label.max()
    head = fit_head(pooled(masked(train.z[old], train.truth[old])), train.label[old])
    return componentwise(selection.risks(head), head.lipschitz * BOUND * PATCHES, selection)


def componentwise(risks: dict[str, DomainRisk], scale: float, selection: Selection) -> list[BoundCheck]:
    """[Cor. 3.1] The risk on images of known classes and the separation on all; nothing bounds the two together."""
    return [
        bounds.two_domains(risks, scale, selection.name, "Cor. 3.1"),
        selection.separation(selection.eta, "Cor. 3.1"),
    ]


# Fitted rules


def fit_head(u: np.ndarray, label: np.ndarray) -> Head:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=500).fit(u, label)
    return Head(model.coef_, model.intercept_)


def direction(phi: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """A head of the class {|v| <= 1}: the direction of a logistic regression without intercept."""
    from sklearn.linear_model import LogisticRegression

    unit = phi / np.linalg.norm(phi, axis=1).mean()  # the regularisation then means the same for every B and s
    v = LogisticRegression(fit_intercept=False, max_iter=1000).fit(unit, sign).coef_[0]
    return v / max(float(np.linalg.norm(v)), 1e-12)


def generalization_row(
    train: Patches, test: Patches, here: np.ndarray, there: np.ndarray, size: int, bound: float, case: str, seed: int
) -> BoundCheck:
    """[Cor. C.1] Of a head for the first half of the classes, and of one that learned coin flips by heart."""
    phi, fresh, coin = masked(train.z, here), masked(test.z, there), np.random.default_rng([seed, 14])
    signs = [(halves(train.label), halves(test.label))]
    signs.append((coin.choice([-1.0, 1.0], len(phi)), coin.choice([-1.0, 1.0], len(fresh))))
    tasks = [(direction(phi, seen), seen, new) for seen, new in signs]
    return bounds.generalization(phi, fresh, tasks, bound, size, case)


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
    classes = len(np.unique(test.label))
    return bounds.tightest([
        bounds.equal_bayes_risk(wrong[0][rows], wrong[1][rows], classes, f"{case}, {name}")
        for name, rows in ((name, test.rows(name)) for name in test.domains)
    ])  # fmt: skip


def summary(z: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What a rule needs of a set of patches whose places do not matter: mean and maximum of each feature, (N,2d)."""
    mean = (z * mask[:, :, None]).sum(1) / np.maximum(mask.sum(1), 1)[:, None]
    return np.concatenate([mean, np.where(mask[:, :, None], z, -np.inf).max(1)], axis=1)


# The same inequalities with one assumption deliberately broken in each row: they must fail


def broken_rows(encoder: Encoder, train: Patches, test: Patches, per_class: int, seed: int) -> list[BoundCheck]:
    """At s = 12; the set whose style reaches C* has `per_class` images per domain and class."""
    styled = draw(replace(local_spec(BROKEN_SIZE, per_class, 1000 * seed + 3), local=False), encoder, couple=True)
    phi, fresh = masked(train.z, train.truth), masked(test.z, test.truth)
    head, noisy, seen = fit_head(phi, train.label), oracle.noisy_mask(test.truth, seed), halves(train.label)
    shifted = select("shifted", test, oracle.shifted_mask(test.truth))
    scale = head.lipschitz * BOUND * PATCHES
    # right for nearly every sample: a small mean error instead of one that bounds every sample
    mostly = test.truth.astype(float)
    mostly[np.random.default_rng([seed, 13]).permutation(len(mostly))[: max(2, round(0.03 * len(mostly)))]] = 0
    few = select("right for 97 %, G = pooled", test, mostly, pooled)
    mean_eta = float(np.linalg.norm(few.learned - few.oracle, axis=1).mean())
    mean_q = float(np.abs(few.mask - test.truth).mean()) * PATCHES

    def summed(mask: np.ndarray) -> np.ndarray:
        return PATCHES**0.5 * pooled(masked(test.z, mask))

    unsound = {
        "sufficiency: C* is replaced by the other patches": bayes_row(
            train, test, ~train.truth, ~test.truth, "the patches outside C*"),
        "|z_p| <= B: features are three times as long": bounds.complexity(3 * phi, BOUND, BROKEN_SIZE, "C*", seed),
        "|C*| <= s: s is given as 1": bounds.complexity(phi, BOUND, 1, "C*", seed),
        "one law for sample and risk: fresh labels are turned round": bounds.generalization(
            phi, fresh, [(direction(phi, seen), seen, -halves(test.label))], BOUND, BROKEN_SIZE, "C*"),
        "G non-expansive: the plain sum over the patches": bounds.mask_stability(
            summed(noisy), summed(test.truth), noisy, test.truth, BOUND, "noisy, G = sum")[0],
        "L: the head is a thousand times steeper than L says": bounds.risk_deviation(
            shifted.risks(head), scale / UNDERSTATED, "shifted"),
        "one law of (Phi_C, Y): style reaches C*": bounds.two_domains(
            select("true mask", styled, styled.truth).risks(head), scale, "true mask"),
        "eta bounds every sample: its mean is used": few.separation(mean_eta),
        "q bounds every sample: its mean is used": few.separation(BOUND * mean_q, "Cor. C.2", "Bq"),
        "one law of (Phi_C, Y), unknown class present: style reaches C*": all_shift_rows(
            train, select("true mask, G = pooled", styled, styled.truth.astype(float), pooled))[0],
    }  # fmt: skip
    return [replace(row, size=BROKEN_SIZE, premises=f"broken: {what}") for what, row in unsound.items()]


# A trained run


def measure_run(run: str | Path, images: int = 400, tick: Tick = lambda _: None, **how: Any) -> dict[str, Any]:
    """The same rows on a trained PatchGen run whose data has true masks; its premises are only approximate.

    z_p is u_p, which has seen every other patch; G, from u to z+, may be expansive; B is the largest |u_p| observed.
    """
    from patchgen.predict.fold_runs import open_subjects
    from patchgen.runs.folder import RunFolder
    from patchgen.tasks.mdg import at_most

    config = RunFolder.open(run).config
    if config.task != "mdg":
        raise ValueError(f"{run} is a run of task {config.task!r}; give one of task 'mdg'")
    [subject] = open_subjects([str(run)], None, **how)
    fold, model = subject.fold, subject.model
    if model.pool != "patchgen":
        raise ValueError(f"method {config.method!r} has no mask that makes z+; give a run of patchgen")
    if subject.truth is None:
        raise ValueError(f"the data of {run}, {fold.table.root}, has no true masks; train on `patchgen oracle` data")
    fresh = dict(fold.validation)
    if fold.test:
        fresh[fold.unseen] = np.concatenate(list(fold.test.values()))
    share = images // len(fresh)
    if share < 2:
        raise ValueError(f"images must be at least {2 * len(fresh)}, two of every domain; got {images}")
    fit_on = at_most(np.concatenate(list(fold.train.values())), images, [config.seed, 15])
    use = np.concatenate([at_most(rows, share, [config.seed, 16, i]) for i, rows in enumerate(fresh.values())])
    (train, _), (test, selection) = (_read(subject, rows, tick) for rows in (fit_on, use))
    truth = subject.truth
    bound = max(float(np.linalg.norm(part.z, axis=2).max()) for part in (train, test))  # B as measured
    size = int(truth.sum(1).max())
    head = Head(*(p.detach().cpu().double().numpy() for p in (model.head.weight, model.head.bias)))
    rows = [
        *subset_rows(train, test, size, bound, config.seed),
        *shift_rows(selection, head, bound),
        *separation_rows(selection, bound),
        *componentwise(selection.risks(head), head.lipschitz * bound * truth.shape[1], selection),
    ]
    # of G between the learned and the true mask: at most 1 if it is non-expansive
    apart = np.linalg.norm(masked(test.z, selection.mask) - masked(test.z, test.truth), axis=1)
    expansion = np.linalg.norm(selection.learned - selection.oracle, axis=1) / np.maximum(apart, 1e-12)
    facts = {"run": Path(run).resolve().name, "data": Path(config.data).name, "fitted on": len(fit_on)}
    facts |= {"measured on": len(use), "largest expansion of G": float(expansion.max())}
    return {"rows": [asdict(replace(row, size=size, premises="approximate")) for row in rows], "facts": facts}


def _read(subject: "Subject", rows: np.ndarray, tick: Tick) -> tuple[Patches, Selection]:
    """u_p, and z+ under the learned and under the true mask, of rows of the run's table."""
    import torch

    from patchgen.model.patchgen import PatchGen

    model, truth, table, outputs = subject.model, subject.truth, subject.fold.table, []
    assert truth is not None and isinstance(model.select, PatchGen)  # checked by `measure_run`
    contexts: list[torch.Tensor] = []  # U (B,P,D), what the module's output projection makes of the patches
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        with torch.inference_mode():
            tokens = model.read(subject.model.backbone.normalised(subject.pixels(part)))
            with model.select.out.register_forward_hook(lambda module, inputs, u: contexts.append(u)):
                out = model.classify(tokens)
            given_truth = model.classify(tokens, torch.from_numpy(truth[part]).to(tokens))
        values = contexts.pop(), out.selection(), out.features, given_truth.features
        outputs.append([value.double().cpu().numpy() for value in values])
        tick(len(part))
    u, mask, learned, true = map(np.concatenate, zip(*outputs, strict=True))
    patches = Patches(u, truth[rows], table.label[rows], table.domain[rows], table.domains)
    return patches, Selection("learned mask", patches, mask, learned, true)

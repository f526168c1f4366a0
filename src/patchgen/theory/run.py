"""The same inequalities on a trained PatchGen run, where the premises are only approximate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.theory.bounds import Head, labelled, masked
from patchgen.theory.oracle import Patches, Tick
from patchgen.theory.rows import Selection, componentwise, largest_norm, separation_rows, shift_rows, subset_rows

if TYPE_CHECKING:
    from patchgen.model.classifier import Classifier

APPROXIMATE = "approximate"
BATCH = 32


def measure_run(run: str | Path, images: int = 400, tick: Tick = lambda _: None) -> dict[str, Any]:
    """The same rows on a trained PatchGen run whose data has true masks; its premises are only approximate.

    The module is read as G(Phi_m): z_p is u_p, the patch after attention, which has seen every other patch; G is
    aggregation, gate and refinement, which need not be non-expansive; B is the largest |u_p| observed.
    """
    from patchgen.data.oracle import true_masks
    from patchgen.predict.predictor import load_run
    from patchgen.tasks.mdg import at_most, make_fold

    predictor = load_run(run)
    if not predictor.model.has_mask:
        raise ValueError(f"method {predictor.config.method!r} has no mask to examine; give a run of patchgen-select")
    if predictor.model.pool != "patchgen":
        raise ValueError(
            f"the theory is about z+, an aggregate of patches, and method {predictor.config.method!r} reads a class "
            "token instead; train a run with --method patchgen"
        )
    if predictor.config.task != "mdg":
        raise ValueError(f"{run} is a run of task {predictor.config.task!r}; give one of task 'mdg'")
    fold = make_fold(predictor.config)
    truth = true_masks(fold.table, predictor.model.grid)
    if truth is None:
        raise ValueError(f"the data of {run}, {fold.table.root}, has no true masks; train on `patchgen oracle` data")
    seed = predictor.config.seed
    unseen = {fold.unseen: np.concatenate(list(fold.test.values()))} if fold.test else {}
    fresh = {**fold.validation, **unseen}
    share = images // len(fresh)
    if share < 2:
        raise ValueError(f"images must be at least {2 * len(fresh)}, two of every domain; got {images}")
    fit_on = at_most(np.concatenate(list(fold.train.values())), images, [seed, 15])
    use = np.concatenate([at_most(rows, share, [seed, 16, i]) for i, rows in enumerate(fresh.values())])
    (train, _), (test, chosen) = (_read(predictor, fold.table, truth, rows, tick) for rows in (fit_on, use))
    size, bound = int(truth.sum(1).max()), largest_norm(train, test)
    linear = predictor.model.head
    head = Head(*(p.detach().cpu().double().numpy() for p in (linear.weight, linear.bias)))
    rows = [
        *subset_rows(train, test, size, bound, seed),
        *shift_rows(test, chosen, head, bound),
        *separation_rows(test, chosen, bound),
        *componentwise(test, chosen, test, chosen, head, bound),
    ]
    facts = {"run": Path(run).resolve().name, "data": Path(predictor.config.data).name, "fitted on": len(fit_on)}
    facts |= {"measured on": len(use), "largest expansion of G": expansion(test, chosen)}
    return {"rows": [asdict(row) for row in labelled(rows, size, APPROXIMATE)], "facts": facts}


def expansion(test: Patches, chosen: Selection) -> float:
    """The largest |G(a) - G(b)| / |a - b| seen between the learned and the true mask: at most 1 if non-expansive."""
    apart = np.linalg.norm(masked(test.z, chosen.mask) - masked(test.z, test.truth), axis=1)
    return float((np.linalg.norm(chosen.learned - chosen.oracle, axis=1) / np.maximum(apart, 1e-12)).max())


def _read(predictor: Any, table: Any, truth: np.ndarray, rows: np.ndarray, tick: Tick) -> tuple[Patches, Selection]:
    """u_p, and z+ under the learned and under the true mask, of rows of a table."""
    import torch

    from patchgen.data.images import decode

    model: Classifier = predictor.model
    parts: dict[str, list[np.ndarray]] = {"u": [], "mask": [], "learned": [], "oracle": []}
    for start in range(0, len(rows), BATCH):
        some = rows[start : start + BATCH]
        image = predictor.inputs(
            [decode(table.file(int(row)), predictor.config.image_size, predictor.interpolation) for row in some]
        )
        with torch.inference_mode():
            tokens = model.read(image)
            own, u = _context(model, tokens)
            given = model.classify(tokens, torch.from_numpy(truth[some]).to(tokens))
        outputs = {"u": u, "mask": own.mask, "learned": own.features, "oracle": given.features}
        for name, value in outputs.items():
            parts[name].append(value.double().cpu().numpy())
        tick(len(some))
    u, mask, learned, true = (np.concatenate(parts[name]) for name in ("u", "mask", "learned", "oracle"))
    patches = Patches(u, truth[rows], table.label[rows], table.domain[rows], table.domains)
    return patches, Selection("learned mask", mask, learned, true)


def _context(model: Classifier, tokens: Any) -> tuple[Any, Any]:
    """The classifier's output and U (B,P,D), what the module's output projection makes of the patches."""
    from patchgen.model.patchgen import PatchGen

    kept: list[Any] = []
    assert isinstance(model.select, PatchGen)  # checked by `measure_run`
    hook = model.select.out.register_forward_hook(lambda module, given, u: kept.append(u))
    try:
        return model.classify(tokens), kept[0]
    finally:
        hook.remove()

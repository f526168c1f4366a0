"""Parts A and B on one run: the predictions for every set of kept patches, as one record per image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.diagnose import faithfulness as faith
from patchgen.predict.attribution import RANKINGS, descending
from patchgen.predict.fold_runs import Subject
from patchgen.tasks.metrics import mask_recovery

CHUNK = 8  # images worked on together
DIGITS = 6
Record = dict[str, Any]


@dataclass(frozen=True)
class Measurements:
    """The measurements for every image."""

    rankings: tuple[str, ...]
    operators: tuple[str, ...]  # the first is also that of insertion and deletion
    steps: int
    seed: int


def measure(
    subject: Subject, rows: np.ndarray, plan: Measurements, share: np.ndarray, tick: Callable[[int], None]
) -> Iterator[Record]:
    """One record per image.

    Args:
        rows: (N,) of the table.
        share: (N,) share of patches that a ranking without its own threshold selects.
        tick: Called with the number of images that are done.
    """
    partner = faith.partners(len(rows), plan.seed)
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        yield from _chunk(subject, rows[part], rows[partner[part]], plan, share[part])
        tick(len(rows[part]))


def _chunk(
    subject: Subject, rows: np.ndarray, others: np.ndarray, plan: Measurements, share: np.ndarray
) -> Iterator[Record]:
    pixels, other = subject.pixels(rows), subject.pixels(others)
    probabilities = subject.probabilities(pixels)
    truth = torch.from_numpy(subject.fold.truth[rows]).to(pixels.device)
    asked = torch.stack([truth, probabilities.argmax(1)], 1)  # (B,2): the true and the predicted class
    scores = rank_all(subject, pixels, rows, asked[:, 1], plan.rankings)
    orders = {name: descending(score, scores["random"]) for name, score in scores.items()}
    count = torch.from_numpy(np.round(share * subject.patches)).to(pixels.device)
    if "mask" in scores:
        count = faith.selected_set(scores["mask"]).sum(1)
    chosen = {
        name: faith.top(order, count) for name, order in orders.items() if name in plan.rankings or name == "truth"
    }
    curves = {name: faith.step_sets(orders[name], plan.steps) for name in chosen}

    answered: dict[str, dict[str, Tensor]] = {}
    for number, (name, answers) in enumerate(_answers(subject, pixels, other, plan).items()):
        answered[name] = _ask(answers, chosen, curves if number == 0 else {}, asked)
    known = subject.truth[rows] if subject.truth is not None else None
    for i, row in enumerate(rows.tolist()):
        yield {
            **_about(subject, row, probabilities[i], asked[i]),
            "selected": round(float(count[i]) / subject.patches, DIGITS),
            **_mask_facts(scores, known, i),
            "perturbation": {operator: _perturbed(values, i, chosen) for operator, values in answered.items()},
            "curves": _curves(answered[plan.operators[0]], i, curves),
        }


def rank_all(
    subject: Subject, pixels: Tensor, rows: np.ndarray, target: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Scores (B,P) of each ranking; always the random one, which orders ties, and the truth if known."""
    images = subject.normalised(pixels)
    scores = {name: RANKINGS[name](subject.model, images, target) for name in dict.fromkeys([*names, "random"])}
    if subject.truth is not None:
        scores["truth"] = torch.from_numpy(subject.truth[rows]).float().to(pixels.device)
    return scores


def _answers(subject: Subject, pixels: Tensor, other: Tensor, plan: Measurements) -> dict[str, faith.Answers]:
    patch, grid = subject.model.backbone.patch_size, subject.model.grid
    answers = {
        name: faith.pixel_answers(subject.probabilities, pixels, faith.OPERATORS[name](pixels, other, patch), grid)
        for name in plan.operators
    }
    if subject.has_mask:
        with torch.no_grad():
            answers |= faith.token_answers(subject.model, subject.normalised(pixels))
    return answers


def _ask(
    answers: faith.Answers,
    chosen: Mapping[str, Tensor],
    curves: Mapping[str, tuple[Tensor, Tensor]],
    asked: Tensor,
) -> dict[str, Tensor]:
    """Name -> (B,K,3): probability of the true and of the predicted class, and whether the true one is the answer."""
    everything = torch.ones_like(next(iter(chosen.values())))
    sets = {"nothing": everything[:, None], "everything": ~everything[:, None]}  # what is perturbed
    for name, keep in chosen.items():
        sets[f"{name}/keep"], sets[f"{name}/perturb"] = keep[:, None], ~keep[:, None]
    for name, (inserted, deleted) in curves.items():
        sets[f"{name}/insertion"], sets[f"{name}/deletion"] = inserted, deleted
    probabilities = faith.ask(answers, torch.cat(list(sets.values()), 1))  # (B,K,C)
    right = probabilities.argmax(2) == asked[:, :1]
    values = torch.cat(
        [probabilities.gather(2, asked[:, None].expand(-1, probabilities.shape[1], -1)), right[..., None]], 2
    )
    return dict(zip(sets, values.split([keep.shape[1] for keep in sets.values()], 1), strict=True))


# Records


def _about(subject: Subject, row: int, probabilities: Tensor, asked: Tensor) -> Record:
    true, predicted = asked.tolist()
    classes = subject.fold.classes
    return {
        "kind": "image",
        "run": subject.name,
        "path": subject.fold.table.paths[row],
        "label": classes[true],
        "predicted": classes[predicted],
        "correct": true == predicted,
        "probability": {"true": _number(probabilities[true]), "predicted": _number(probabilities[predicted])},
    }


def _mask_facts(scores: Mapping[str, Tensor], known: np.ndarray | None, i: int) -> Record:
    facts: Record = {}
    if "mask" in scores:
        mask = scores["mask"][i]
        facts["mask"] = {name: _number(getattr(mask, name)()) for name in ("min", "mean", "max")}
    if known is not None:
        one = {name: score[i : i + 1].detach().cpu().numpy() for name, score in scores.items() if name != "truth"}
        recovery = {name: mask_recovery(score, known[i : i + 1]) for name, score in one.items()}
        facts["auroc"] = {name: _number(each["auroc"][0]) for name, each in recovery.items()}
        if "mask" in recovery:
            facts["mask"] |= {name: _number(recovery["mask"][name][0]) for name in ("iou", "error", "kept")}
    return facts


def _perturbed(answered: Mapping[str, Tensor], i: int, chosen: Mapping[str, Tensor]) -> Record:
    record: Record = {name: _values(answered[name][i, 0]) for name in ("nothing", "everything")}
    for name in chosen:
        record[name] = {side: _values(answered[f"{name}/{side}"][i, 0]) for side in ("keep", "perturb")}
    return record


def _curves(answered: Mapping[str, Tensor], i: int, names: Mapping[str, Any]) -> Record:
    def lists(values: Tensor) -> Record:
        return {which: [_number(v) for v in values[:, n]] for n, which in enumerate(("true", "predicted"))}

    return {name: {way: lists(answered[f"{name}/{way}"][i]) for way in ("insertion", "deletion")} for name in names}


def _values(three: Tensor) -> Record:
    true, predicted, correct = three.tolist()
    return {"true": round(true, DIGITS), "predicted": round(predicted, DIGITS), "correct": bool(correct)}


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, DIGITS) if np.isfinite(number) else None

"""Parts A and B on one run: the predictions for every set of kept patches, as one record per image; and their means."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from patchgen.common.text import did_you_mean
from patchgen.diagnose import faithfulness as faith
from patchgen.predict.attribution import RANKINGS, descending
from patchgen.predict.fold_runs import Subject
from patchgen.predict.predictor import Checkpoint
from patchgen.tasks.metrics import mask_recovery

CHUNK = 8  # images worked on together
DIGITS = 6
CLASSES = ("true", "predicted")  # whose probability is recorded
Record = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The options of a diagnosis, as in `patchgen diagnose --help`."""

    images: int = 200
    steps: int = 8
    operators: tuple[str, ...] = tuple(faith.OPERATORS)  # the first is also that of insertion and deletion
    rankings: tuple[str, ...] = ()
    projection: Literal["auto", "umap", "pca"] = "auto"
    checkpoint: Checkpoint = "selected"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("images", 2), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        known = ", ".join(faith.OPERATORS)
        if not self.operators:
            raise ValueError(f"--operators needs at least one of {known}")
        for name in self.operators:
            if name not in faith.OPERATORS:
                raise ValueError(f"--operators has no {name!r}{did_you_mean(name, faith.OPERATORS)} (known: {known})")
        object.__setattr__(self, "operators", tuple(dict.fromkeys(self.operators)))


def measure(
    subject: Subject,
    rows: np.ndarray,
    rankings: Sequence[str],
    options: Options,
    share: np.ndarray,
    tick: Callable[[int], None],
) -> Iterator[Record]:
    """One record per image; `share` (N,) of its patches is what a ranking without its own threshold selects."""
    partner = faith.partners(len(rows), options.seed)
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        yield from _chunk(subject, rows[part], rows[partner[part]], rankings, options, share[part])
        tick(len(rows[part]))


def _chunk(
    subject: Subject, rows: np.ndarray, others: np.ndarray, rankings: Sequence[str], options: Options, share: np.ndarray
) -> Iterator[Record]:
    pixels, classes = subject.pixels(rows), subject.fold.classes
    probabilities = subject.probabilities(pixels)
    truth = torch.from_numpy(subject.fold.truth[rows]).to(pixels.device)
    asked = torch.stack([truth, probabilities.argmax(1)], 1)  # (B,2): the true and the predicted class
    scores = rank_all(subject, pixels, rows, asked[:, 1], rankings)
    orders = {name: descending(score, scores["random"]) for name, score in scores.items()}
    count = torch.from_numpy(np.round(share * subject.patches)).to(pixels.device)
    if "mask" in scores:
        count = (scores["mask"] >= faith.THRESHOLD).sum(1)
    selections = {name: faith.top(order, count) for name, order in orders.items() if name in (*rankings, "truth")}
    curves = {name: faith.step_sets(orders[name], options.steps) for name in selections}

    answered: dict[str, dict[str, np.ndarray]] = {}
    for name, answers in _answers(subject, pixels, subject.pixels(others), options.operators).items():
        answered[name] = _ask(answers, selections, {} if answered else curves, asked)  # the first draws the curves
    facts = _mask_facts(scores, subject.truth[rows] if subject.truth is not None else None)
    numbers = np.round(probabilities.gather(1, asked).double().cpu().numpy(), DIGITS).tolist()
    for i, row in enumerate(rows.tolist()):
        true, predicted = asked[i].tolist()
        yield {
            "kind": "image",
            "run": subject.name,
            "path": subject.fold.table.paths[row],
            "label": classes[true],
            "predicted": classes[predicted],
            "correct": true == predicted,
            "probability": dict(zip(CLASSES, numbers[i], strict=True)),
            "selected": round(float(count[i]) / subject.patches, DIGITS),
            **facts[i],
            "perturbation": {operator: _perturbed(values, i, selections) for operator, values in answered.items()},
            "curves": {name: _curves_of(answered[options.operators[0]], i, name) for name in curves},
        }


def rank_all(
    subject: Subject, pixels: Tensor, rows: np.ndarray, target: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Scores (B,P) of each ranking; always the random one, which orders ties, and the truth if known."""
    images = subject.model.backbone.normalised(pixels)
    scores = {name: RANKINGS[name](subject.model, images, target) for name in dict.fromkeys([*names, "random"])}
    if subject.truth is not None:
        scores["truth"] = torch.from_numpy(subject.truth[rows]).float().to(pixels.device)
    return scores


def _answers(subject: Subject, pixels: Tensor, other: Tensor, operators: Sequence[str]) -> dict[str, faith.Answers]:
    patch, grid = subject.model.backbone.patch_size, subject.model.grid
    answers = {
        name: faith.pixel_answers(subject.probabilities, pixels, faith.OPERATORS[name](pixels, other, patch), grid)
        for name in operators
    }
    if subject.model.has_mask:
        with torch.no_grad():
            answers |= faith.token_answers(subject.model, subject.model.backbone.normalised(pixels))
    return answers


def _ask(
    answers: faith.Answers, selections: Mapping[str, Tensor], curves: Mapping[str, tuple[Tensor, Tensor]], asked: Tensor
) -> dict[str, np.ndarray]:
    """Name -> (B,K,3): probability of the true and of the predicted class, and whether the true one is the answer."""
    everything = torch.ones_like(next(iter(selections.values())))
    sets = {"nothing": everything[:, None], "everything": ~everything[:, None]}  # what is perturbed
    for name, keep in selections.items():
        sets[f"{name}/keep"], sets[f"{name}/perturb"] = keep[:, None], ~keep[:, None]
    for name, (inserted, deleted) in curves.items():
        sets[f"{name}/insertion"], sets[f"{name}/deletion"] = inserted, deleted
    probabilities = faith.ask(answers, torch.cat(list(sets.values()), 1))  # (B,K,C)
    right = probabilities.argmax(2) == asked[:, :1]
    of_asked = probabilities.gather(2, asked[:, None].expand(-1, probabilities.shape[1], -1))
    values = np.round(torch.cat([of_asked, right[..., None]], 2).double().cpu().numpy(), DIGITS)
    ends = np.cumsum([keep.shape[1] for keep in sets.values()])
    return dict(zip(sets, np.split(values, ends[:-1], axis=1), strict=True))


def _perturbed(answered: Mapping[str, np.ndarray], i: int, rankings: Iterable[str]) -> Record:
    def answer(name: str) -> Record:
        true, predicted, correct = answered[name][i, 0].tolist()
        return {"true": true, "predicted": predicted, "correct": bool(correct)}

    sides = {name: {side: answer(f"{name}/{side}") for side in ("keep", "perturb")} for name in rankings}
    return {"nothing": answer("nothing"), "everything": answer("everything"), **sides}


def _curves_of(answered: Mapping[str, np.ndarray], i: int, ranking: str) -> Record:
    curves = {way: answered[f"{ranking}/{way}"][i, :, :2].T.tolist() for way in ("insertion", "deletion")}
    return {way: dict(zip(CLASSES, curve, strict=True)) for way, curve in curves.items()}


def _mask_facts(scores: Mapping[str, Tensor], truth: np.ndarray | None) -> list[Record]:
    """Of each image the statistics of the mask and, if the truth is known, how well each ranking finds it."""
    arrays = {name: score.detach().cpu().numpy() for name, score in scores.items()}
    facts: dict[str, dict[str, np.ndarray]] = {}
    if "mask" in arrays:
        facts["mask"] = {name: getattr(arrays["mask"], name)(1) for name in ("min", "mean", "max")}
    if truth is not None:
        recovery = {name: mask_recovery(score, truth) for name, score in arrays.items() if name != "truth"}
        facts["auroc"] = {name: each["auroc"] for name, each in recovery.items()}
        if "mask" in recovery:
            facts["mask"] |= {name: recovery["mask"][name] for name in ("iou", "error", "kept")}
    return [
        {part: {name: round(float(values[i]), DIGITS) if np.isfinite(values[i]) else None
                for name, values in of_part.items()} for part, of_part in facts.items()}
        for i in range(len(arrays["random"]))
    ]  # fmt: skip


# Means over images and their standard errors

SUMMARY = {"correct": "accuracy", "true": "p_true", "predicted": "p_predicted"}  # names of records in a summary


def means(records: Sequence[Any]) -> Any:
    """Mean and error of each number of nested records."""
    if not isinstance(records[0], dict):
        return mean_and_error(records)
    return {SUMMARY.get(name, name): means([record[name] for record in records]) for name in records[0]}


def mean_and_error(values: Iterable[float | bool | None]) -> dict[str, float] | None:
    """Mean over images and its standard error; images without the value are left out; None if all are."""
    known = np.array([v for v in values if v is not None], dtype=float)
    if not len(known):
        return None
    error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else 0.0
    return {"mean": float(known.mean()), "error": float(error)}


def paired(first: Sequence[float], second: Sequence[float]) -> Record:
    """Mean difference over the same images, of which there is one at least, and whether it exceeds two errors."""
    difference: Any = mean_and_error(np.subtract(first, second, dtype=float).tolist())
    return {**difference, "clear": abs(difference["mean"]) > 2 * difference["error"]}


def summarise(records: Sequence[Record], patches: int) -> Record:
    """The summary of one run for the page, the figures and the claims."""
    summary: Record = {"images": len(records), "patches": patches, "mask": None, "auroc": None}
    for name in ("correct", "selected", "mask", "auroc"):
        if name in records[0]:
            summary[SUMMARY.get(name, name)] = means([record[name] for record in records])
    if summary["mask"]:
        full, empty = (sum(r["selected"] == share for r in records) for share in (1, 0))
        verdict = mask_verdict(full, empty, len(records))
        summary["mask"] = {"full": full, "empty": empty, "verdict": verdict, **summary["mask"]}
    summary["perturbation"] = {
        operator: {"nothing": sides.pop("nothing"), "everything": sides.pop("everything"), "rankings": sides}
        for operator, sides in means([record["perturbation"] for record in records]).items()
    }
    summary["curves"] = {
        name: _curve([record["curves"][name] for record in records], patches) for name in records[0]["curves"]
    }
    return summary


def mask_verdict(full: int, empty: int, images: int) -> str:
    """A verdict on the masks: a selection of all patches, or of none, cannot be tested."""
    if full == images:
        return "all 1: the mask selects every patch of every image, so there is no selection to test"
    if empty == images:
        return "all 0: the mask selects no patch of any image, so there is no selection to test"
    if full + empty == 0:
        return "selective: in every image some patches are selected and some are not"
    kind = "mostly constant:" if full + empty > images / 2 else "selective, but"
    return f"{kind} all patches are selected in {full} of {images} images and none in {empty}"


def _curve(images: Sequence[Record], patches: int) -> Record:
    summary: Record = {}
    for way in ("insertion", "deletion"):
        curves = {which: np.array([r[way][which] for r in images]) for which in CLASSES}  # (N,steps+1)
        summary[way] = {which: curve.mean(0).tolist() for which, curve in curves.items()}
        summary[f"{way}_auc"] = {which: mean_and_error(faith.area(curve, patches)) for which, curve in curves.items()}
    return summary

"""Evaluate a model on labelled images: every metric with its sample size, and None if it is undefined.

    found = evaluate(collect(predictor, table, rows), positive="tumour")
    found["metrics"]["balanced_accuracy"], found["intervals"]["balanced_accuracy"], found["sites"]["lyon"]

Images of classes that the model does not know, unlabelled ones and broken ones are counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from patchgen.common.text import did_you_mean
from patchgen.predict.answers import UNKNOWN, Answers
from patchgen.predict.intervals import LEVEL, Ranking, bootstrap, counted
from patchgen.tasks.metrics import (
    RANKED,
    accuracy,
    class_counts,
    class_ranking,
    mean,
    probability_scores,
    reliability,
    scores,
)
from patchgen.train.tallies import PatientTally

RESAMPLES = 1000
WORK = 1_000_000_000  # images x classes x resamples for the intervals of AUROC and average precision: half a minute
FEWEST = 100  # minimum number of resamples for an interval
FEW_PATIENTS = 10
SAME = 1e-6  # largest difference of the probabilities of identical images
OWN = "positive: "  # prefix of the positive class's metrics in the bootstrap
METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC (one against rest)",
    "average_precision": "average precision (one against rest)",
    "calibration_error": "calibration error",
    "mean_confidence": "mean confidence",
}


def evaluate(
    answers: Answers,
    positive: str | None = None,
    resamples: int = RESAMPLES,
    trained_on: Sequence[str] = (),
    tick: Callable[[int], None] | None = None,
    expected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All metrics of a model's answers, ready for JSON.

    Args:
        answers: Of `collect`.
        positive: A class of the model; adds the scores of this class against all others.
        resamples: Draws of the bootstrap; 0 leaves the intervals out.
        trained_on: Names of the sites of training, to warn of those that occur again.
        tick: Called with 1 after each draw.
        expected: What `fit` expected at a new site, as in the model's config.json; it is compared with each new site.

    Raises:
        ValueError: `positive` is no class of the model.
    """
    check_options(positive, resamples, answers.classes)
    whole, known = answers, answers.known()
    unit, name = units(known)
    per_class = _per_class(known)
    found: dict[str, Any] = {
        "images": _counts(whole),
        "classes": list(known.classes),
        "metrics": metrics(known),
        "undefined": _undefined(known),
        **_intervals(known, unit, positive, resamples, tick),
        "bootstrap": _bootstrap_facts(known, unit, name, resamples),
        "positive": positive,
        "binary": _binary(per_class, positive) if positive else None,
        "per_class": per_class,
        "confusion": confusion(known).tolist(),
        "reliability": [one._asdict() for one in reliability(known.confidence, known.right)],
        "sites": _sites(known, resamples, trained_on),
        "patients": _patients(known),
    }
    found["expected"] = against_expected(found["sites"], expected) if expected else None
    return {**found, "notes": _notes(whole, known, found, trained_on)}


def check_options(positive: str | None, resamples: int, classes: Sequence[str]) -> None:
    """Check the options before any image is read."""
    if positive is not None and positive not in classes:
        hint = did_you_mean(positive, classes)
        raise ValueError(f"--positive {positive!r} is not a class of the model{hint} (classes: {', '.join(classes)})")
    if resamples < 0 or 0 < resamples < FEWEST:
        raise ValueError(f"--resamples must be 0 (no intervals) or at least {FEWEST}, not {resamples}")


def bootstrap_draws(answers: Answers, resamples: int) -> int:
    """The number of times that `evaluate` will call `tick`."""
    known = answers.known()
    return (resamples + _ranked_draws(known, resamples)) if units(known)[0].max() > 0 else 0


# Parts


def confusion(answers: Answers, weights: np.ndarray | None = None) -> np.ndarray:
    """(C, C) true x predicted, with images weighted by `weights`."""
    side = len(answers.classes)
    return (
        np.bincount(answers.label * side + answers.predicted, weights, side * side).astype(np.int64).reshape(side, side)
    )


def metrics(answers: Answers) -> dict[str, Any]:
    """The headline numbers, by name as in METRICS."""
    counted = scores(confusion(answers))
    ranked = probability_scores(answers.label, answers.probabilities)
    found = {**counted, **ranked, "mean_confidence": float(answers.confidence.mean())}
    return {name: found[name] for name in METRICS}


def units(answers: Answers) -> tuple[np.ndarray, str]:
    """(N,) units of the bootstrap, as 0 .. K-1, and their name: patients, or images if no group is known."""
    group = answers.table.group
    if group is None:
        return np.arange(len(answers.rows)), "images"
    return np.unique([group[row] for row in answers.rows], return_inverse=True)[1], "patients"


def _ranked_draws(answers: Answers, resamples: int) -> int:
    draws = min(resamples, WORK // answers.probabilities.size)
    return draws if draws >= FEWEST else 0


def _intervals(
    answers: Answers, unit: np.ndarray, positive: str | None, resamples: int, tick: Callable[[int], None] | None
) -> dict[str, dict[str, list[float] | None]]:
    """Intervals of the main metrics, of the accuracy per patient, and of the positive class."""
    right, index = answers.right, answers.classes.index(positive) if positive else None

    def counts(weights: np.ndarray) -> dict[str, float | None]:
        square = confusion(answers, weights)
        each = counted(square)
        found = {
            "accuracy": accuracy(square),
            "balanced_accuracy": mean(each["recall"]),
            "macro_f1": mean(each["f1"]),
            "patient_accuracy": _patient_accuracy(unit, weights, right),
        }
        return found | ({} if index is None else _of_class(each, index))

    def ranks(weights: np.ndarray) -> dict[str, float | None]:
        each = rank(weights)
        found = {name: mean(values) for name, values in each.items()}
        return found | ({} if index is None else _of_class(each, index))

    drawn = bootstrap(counts, unit, resamples, tick)
    if ranked := _ranked_draws(answers, resamples):
        rank = Ranking(answers.label, answers.probabilities)
        drawn |= bootstrap(ranks, unit, ranked, tick)
    spans = {name: list(value) if value else None for name, value in drawn.items()}
    own = [*METRICS, *(["patient_accuracy"] if answers.table.group else [])]
    return {
        "intervals": {name: spans[name] for name in own if name in spans},
        "binary_intervals": {name[len(OWN) :]: span for name, span in spans.items() if name.startswith(OWN)},
    }


def _of_class(each: dict[str, list[float | None]], index: int) -> dict[str, float | None]:
    return {OWN + name: values[index] for name, values in each.items()}


def _patient_accuracy(unit: np.ndarray, weights: np.ndarray, right: np.ndarray) -> float:
    """Mean over the drawn patients of the share of their images that are right."""
    images, hits = np.bincount(unit, weights), np.bincount(unit, weights * right)
    times = np.zeros(len(images))
    times[unit] = weights
    drawn = times > 0
    return float(hits[drawn] / images[drawn] @ times[drawn] / times.sum())


def _bootstrap_facts(answers: Answers, unit: np.ndarray, name: str, resamples: int) -> dict[str, Any]:
    return {
        "unit": name,
        "units": int(unit.max()) + 1,
        "resamples": resamples if unit.max() > 0 else 0,
        "resamples_ranked": _ranked_draws(answers, resamples) if unit.max() > 0 else 0,
        "level": LEVEL,
    }


def _per_class(answers: Answers) -> dict[str, dict[str, Any]]:
    """Each class against the rest; None where a number is undefined."""
    square = confusion(answers)
    each = {**class_counts(square), **class_ranking(answers.label, answers.probabilities)}
    return {
        name: {"images": int(square[i].sum()), **{key: values[i] for key, values in each.items()}}
        for i, name in enumerate(answers.classes)
    }


def _binary(per_class: dict[str, Any], positive: str) -> dict[str, Any]:
    """The positive class against all others: predicted where it is the likeliest class."""
    own, total = per_class[positive], sum(one["images"] for one in per_class.values())
    return {**own, "prevalence": own["images"] / total}


def _sites(answers: Answers, resamples: int, trained_on: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The main metrics of each site, with an interval of its accuracy over its patients."""
    found = {}
    for index in np.unique(answers.site):
        part, name = answers.take(answers.site == index), answers.table.domains[index]
        unit, _ = units(part)
        interval = bootstrap(_accuracy_of(part.right), unit, resamples).get("accuracy")
        found[name] = {
            "images": len(part.rows),
            "units": int(unit.max()) + 1,
            **metrics(part),
            "accuracy_interval": list(interval) if interval else None,
            "unlike_training": None if part.unlike is None else float(part.unlike.mean()),
            "in_training": name in trained_on,
        }
    return found


def against_expected(sites: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Any]) -> dict[str, Any]:
    """What `fit` expected at a new site beside the accuracy measured at each site that is new to the model."""
    span = expected.get("new_site")

    def verdict(accuracy: float) -> str | None:
        return None if span is None else "below" if accuracy < span[0] else "above" if accuracy > span[1] else "inside"

    measured = {
        name: {"accuracy": site["accuracy"], "verdict": verdict(site["accuracy"])}
        for name, site in sites.items()
        if not site["in_training"]
    }
    return {"mean": expected["mean"], "new_site": span, "sites": measured}


def expected_line(comparison: Mapping[str, Any]) -> str:
    """`fit expected 0.71 to 0.94 at a new site; measured 0.925 at lyon: inside.`"""
    span, sites = comparison["new_site"], comparison["sites"]
    said = f"{span[0]:.2f} to {span[1]:.2f}" if span else f"{comparison['mean']:.2f} (without an interval)"
    measured = [
        f"{site['accuracy']:.3f} at {name}" + (f": {site['verdict']}" if site["verdict"] else "")
        for name, site in sites.items()
    ]
    return f"fit expected {said} at a new site; " + (
        f"measured {', '.join(measured)}." if measured else "no scored site is new to the model."
    )


def _accuracy_of(right: np.ndarray) -> Callable[[np.ndarray], dict[str, float | None]]:
    return lambda weights: {"accuracy": float(weights @ right / weights.sum())}


def _patients(answers: Answers) -> dict[str, Any] | None:
    """Results per patient, as a run's test record has them, and a line for each patient; None without groups."""
    group = answers.table.group
    if group is None:
        return None
    tally = PatientTally(group, answers.rows, len(answers.classes))
    logits = torch.from_numpy(answers.probabilities).clamp(min=1e-30).log()
    tally.add(answers.rows, logits, torch.from_numpy(answers.label))
    images = tally.truth.sum(1)
    lines = {
        name: {
            "images": int(images[i]),
            "accuracy": float(tally.hits[i] / images[i]),
            "labels": [answers.classes[c] for c in tally.truth[i].nonzero()[:, 0].tolist()],
            "label": answers.classes[int(tally.probability[i].argmax())],  # by the mean probability
        }
        for i, name in enumerate(tally.names)
    }
    return {**tally.record(), "each": lines}


# What a reader must know


def _counts(answers: Answers) -> dict[str, Any]:
    unknown = answers.label == UNKNOWN
    of = {answers.table.label_name(row) for row in answers.rows[unknown]}
    return {
        "scored": int((~unknown).sum()),
        "unknown_class": int(unknown.sum()),
        "unknown_classes": sorted(of),
        "unlabelled": answers.unlabelled,
        "unreadable": len(answers.unreadable),
    }


def _undefined(answers: Answers) -> dict[str, str]:
    present = np.unique(answers.label)
    if len(present) > 1:
        return {}
    why = f"all scored images are of class {answers.classes[present[0]]!r}; it needs images of two classes"
    return dict.fromkeys(RANKED, why)


def _notes(whole: Answers, known: Answers, found: dict[str, Any], trained_on: Sequence[str]) -> list[str]:
    """Sentences for the page, the terminal and the JSON file."""
    counts, notes = found["images"], [expected_line(found["expected"])] if found["expected"] else []
    if counts["unknown_class"]:
        with_them = float(whole.right.mean())
        notes.append(
            f"{_images(counts['unknown_class'], 'is', 'are')} of classes that the model does not know "
            f"({', '.join(counts['unknown_classes'])}) and left out; counted as wrong, they make the accuracy "
            f"{with_them:.3f}."
        )
    if counts["unlabelled"]:
        notes.append(f"Left out: {_images(counts['unlabelled'], 'has', 'have')} no label.")
    if counts["unreadable"]:
        notes.append(f"Left out, and named below: {_images(counts['unreadable'], 'cannot', 'cannot')} be read.")
    missing = [name for name, one in found["per_class"].items() if not one["images"]]
    if missing:
        notes.append(
            f"No image is of class {', '.join(missing)}: its recall, AUROC and average precision are empty, and means "
            "over classes leave it out."
        )
    notes += [f"{METRICS[name]} is undefined: {why}." for name, why in found["undefined"].items()]
    if len(known.rows) > 1 and float(np.ptp(known.probabilities, axis=0).max()) < SAME:
        notes.append(
            "All images get the same probabilities, as identical images do: confidence, calibration and the share "
            "unlike training mean nothing here."
        )
    notes += _interval_notes(known, found["bootstrap"])
    again = [site for site in found["sites"] if site in trained_on]
    if again:
        notes.append(
            f"The model was trained on sites of the same name ({', '.join(again)}): if the images are the same, "
            "their scores are too optimistic."
        )
    return notes


def _images(count: int, one: str, many: str) -> str:
    return f"1 image {one}" if count == 1 else f"{count:,} images {many}"


def _interval_notes(known: Answers, facts: dict[str, Any]) -> list[str]:
    units_, name = facts["units"], facts["unit"]
    if units_ < 2:
        alone = "All scored images are of one patient" if name == "patients" else "Only one image was scored"
        return [f"{alone}: there is no interval."]
    if not facts["resamples"]:
        return ["No intervals: --resamples 0."]
    notes = [f"Intervals are 95 % percentile intervals of {facts['resamples']:,} resamples over {units_:,} {name}."]
    if name == "images":
        notes.append(
            "No patient or slide is known, so images are resampled as if they were independent; if several show one "
            "patient, the true intervals are wider. The column group of a manifest names patients."
        )
    elif units_ < FEW_PATIENTS:
        notes.append(f"{units_} patients are few: the intervals are rough, and probably too narrow.")
    if not facts["resamples_ranked"]:
        notes.append("AUROC and average precision have no interval: too many images and classes to resample.")
    elif facts["resamples_ranked"] < facts["resamples"]:
        notes.append(f"Those of AUROC and average precision use {facts['resamples_ranked']:,} resamples.")
    return notes


def most_wrong(answers: Answers, count: int) -> np.ndarray:
    """Positions (K,) of the wrong predictions with the highest confidence first, among known classes."""
    wrong = np.flatnonzero(~answers.right)
    return wrong[np.argsort(-answers.confidence[wrong], kind="stable")[:count]]

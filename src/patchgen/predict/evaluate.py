"""Evaluate a model on labelled images: every metric with its sample size, and None if it is undefined.

Images of classes that the model does not know, unlabelled ones and broken ones are counted and left out. Intervals are
the 2.5th to the 97.5th percentile of a bootstrap over patients: all images of one that is drawn twice count twice.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from patchgen.common.text import did_you_mean
from patchgen.predict.answers import UNKNOWN, Answers
from patchgen.tasks.metrics import class_counts, class_ranking, falling, mean, probability_scores, reliability, scores
from patchgen.train.evaluate import patient_scores

LEVEL, SEED = 0.95, 20  # of the intervals
RESAMPLES = 1000
WORK = 1_000_000_000  # images x classes x resamples for the intervals of AUROC and average precision: half a minute
FEWEST = 100  # minimum number of resamples for an interval
FEW_PATIENTS = 10
SAME = 1e-6  # largest difference of the probabilities of identical images
POSITIVE = "positive: "  # prefix of the positive class's metrics in the bootstrap
METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC (one against rest)",
    "average_precision": "average precision (one against rest)",
    "calibration_error": "calibration error",
    "mean_confidence": "mean confidence",
}

Tick = Callable[[int], None]
Values = Mapping[str, float | None]  # None: undefined


def evaluate(
    answers: Answers, positive: str | None = None, resamples: int = RESAMPLES, trained_on: Sequence[str] = (),
    tick: Tick | None = None, expected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All metrics of a model's answers, ready for JSON; `positive` is a class to score against all others too."""
    check_options(positive, resamples, answers.classes)
    known, unknown = answers.known(), answers.rows[answers.label == UNKNOWN].tolist()
    unit, unit_name = units(known)
    count = int(unit.max()) + 1
    orders, ranked = list(falling(known.label, known.probabilities)), known.probabilities.size * resamples <= WORK
    square, sites, headline = confusion(known), _sites(known, resamples, trained_on), metrics(known)
    each = {"images": square.sum(1).tolist(), **class_counts(square), **class_ranking(orders)}
    per_class = {name: {key: values[i] for key, values in each.items()} for i, name in enumerate(known.classes)}
    spans = _intervals(known, unit, positive, resamples, orders if ranked else None, tick)
    alone = f"all scored images are of class {known.classes[known.label[0]]!r}; it needs images of two classes"
    named = [*METRICS, *(["patient_accuracy"] if known.table.group else [])]
    binary = positive and {**per_class[positive], "prevalence": per_class[positive]["images"] / len(known.rows)}
    results: dict[str, Any] = {
        "images": {
            "scored": len(known.rows),
            "unknown_class": len(unknown),
            "unknown_classes": sorted({answers.table.label_name(row) for row in unknown}),
            "unlabelled": answers.unlabelled,
            "unreadable": len(answers.unreadable),
        },
        "classes": list(known.classes),
        "metrics": headline,
        "undefined": {name: alone for name, value in headline.items() if value is None},
        "intervals": {name: spans[name] for name in named if name in spans},
        "binary_intervals": {n.removeprefix(POSITIVE): span for n, span in spans.items() if n.startswith(POSITIVE)},
        "bootstrap": {
            "unit": unit_name,
            "units": count,
            "resamples": resamples if count > 1 else 0,
            "resamples_ranked": resamples if count > 1 and ranked else 0,
            "level": LEVEL,
        },
        "positive": positive,
        "binary": binary,
        "per_class": per_class,
        "confusion": square.tolist(),
        "reliability": [reliability_bin._asdict() for reliability_bin in reliability(known.confidence, known.right)],
        "sites": sites,
        "patients": _patients(known),
        "expected": against_expected(sites, expected) if expected else None,
    }
    return {**results, "notes": _notes(answers, known, results, trained_on)}


def check_options(positive: str | None, resamples: int, classes: Sequence[str]) -> None:
    """Check the options before any image is read."""
    if positive is not None and positive not in classes:
        hint = did_you_mean(positive, classes)
        raise ValueError(f"--positive {positive!r} is not a class of the model{hint} (classes: {', '.join(classes)})")
    if resamples < 0 or 0 < resamples < FEWEST:
        raise ValueError(f"--resamples must be 0 (no intervals) or at least {FEWEST}, not {resamples}")


def confusion(answers: Answers, weights: np.ndarray | None = None) -> np.ndarray:
    """(C, C) true x predicted, with images weighted by `weights`."""
    side = len(answers.classes)
    cells = np.bincount(answers.label * side + answers.predicted, weights, side * side)
    return cells.astype(np.int64).reshape(side, side)


def metrics(answers: Answers) -> dict[str, Any]:
    """The headline numbers, by name as in METRICS."""
    values = scores(confusion(answers)) | probability_scores(answers.label, answers.probabilities)
    values["mean_confidence"] = float(answers.confidence.mean())
    return {name: values[name] for name in METRICS}


def _sites(answers: Answers, resamples: int, trained_on: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The main metrics of each site, with an interval of its accuracy over its patients."""
    sites, domain = {}, answers.table.domain[answers.rows]
    for index in np.unique(domain):
        part, name = answers.take(domain == index), answers.table.domains[index]
        unit, _ = units(part)

        def site_accuracy(weights: np.ndarray, right: np.ndarray = part.right) -> Values:
            return {"accuracy": float(weights @ right / weights.sum())}

        sites[name] = {
            "images": len(part.rows),
            "units": int(unit.max()) + 1,
            **metrics(part),
            "accuracy_interval": bootstrap(site_accuracy, unit, resamples).get("accuracy"),
            "unlike_training": None if part.unlike is None else float(part.unlike.mean()),
            "in_training": name in trained_on,
        }
    return sites


def against_expected(sites: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Any]) -> dict[str, Any]:
    """What `fit` expected at a new site beside the accuracy measured at each site that is new to the model."""
    span, measured = expected.get("new_site"), {}
    for name, site in sites.items():
        if not site["in_training"]:
            accuracy, verdict = site["accuracy"], None
            if span:
                verdict = "below" if accuracy < span[0] else "above" if accuracy > span[1] else "inside"
            measured[name] = {"accuracy": accuracy, "verdict": verdict}
    return {"mean": expected["mean"], "new_site": span, "sites": measured}


def expected_line(comparison: Mapping[str, Any]) -> str:
    """`fit expected 0.71 to 0.94 at a new site; measured 0.925 at lyon: inside.`"""
    span, sites = comparison["new_site"], comparison["sites"]
    range_text = f"{span[0]:.2f} to {span[1]:.2f}" if span else f"{comparison['mean']:.2f} (without an interval)"
    measured = [
        f"{site['accuracy']:.3f} at {name}" + (f": {site['verdict']}" if site["verdict"] else "")
        for name, site in sites.items()
    ]
    outcome = f"measured {', '.join(measured)}" if measured else "no scored site is new to the model"
    return f"fit expected {range_text} at a new site; {outcome}."


def _patients(answers: Answers) -> dict[str, Any] | None:
    """Results per patient, as a run's test record has them, and a line for each patient; None without groups."""
    import pandas as pd

    group = answers.table.group
    if group is None:
        return None
    names = [group[row] for row in answers.rows]
    label, probabilities = answers.label, answers.probabilities
    lines = {
        str(name): {
            "images": len(images),
            "accuracy": float((probabilities[images].argmax(1) == label[images]).mean()),
            "labels": [answers.classes[c] for c in np.unique(label[images])],
            "label": answers.classes[int(probabilities[images].mean(0).argmax())],  # by the mean probability
        }
        for name, images in pd.Series(names).groupby(np.array(names)).indices.items()
    }
    return {**patient_scores(names, label, probabilities), "each": lines}


def units(answers: Answers) -> tuple[np.ndarray, str]:
    """(N,) units of the bootstrap, as 0 .. K-1, and their name: patients, or images if no group is known."""
    group = answers.table.group
    if group is None:
        return np.arange(len(answers.rows)), "images"
    return np.unique([group[row] for row in answers.rows], return_inverse=True)[1], "patients"


def _intervals(
    answers: Answers, unit: np.ndarray, positive: str | None, resamples: int, orders: Any, tick: Tick | None
) -> dict[str, list[float] | None]:
    """Intervals of the main metrics, of the accuracy per patient, and of the positive class."""
    index = answers.classes.index(positive) if positive else None

    def statistic(weights: np.ndarray) -> Values:
        square = confusion(answers, weights)
        totals, ranks = scores(square), class_ranking(orders, weights) if orders else {}
        values: dict[str, float | None] = {name: totals[name] for name in ("accuracy", "balanced_accuracy", "macro_f1")}
        values["patient_accuracy"] = _patient_accuracy(unit, weights, answers.right)
        values |= {name: mean(column) for name, column in ranks.items()}
        if index is not None:
            values |= {POSITIVE + name: column[index] for name, column in (class_counts(square) | ranks).items()}
        return values

    return bootstrap(statistic, unit, resamples, tick)


def _patient_accuracy(unit: np.ndarray, weights: np.ndarray, right: np.ndarray) -> float:
    """Mean over the drawn patients of the share of their images that are right."""
    images, hits = np.bincount(unit, weights), np.bincount(unit, weights * right)
    times = np.zeros(len(images))
    times[unit] = weights
    drawn = times > 0
    return float(hits[drawn] / images[drawn] @ times[drawn] / times.sum())


def bootstrap(
    statistic: Callable[[np.ndarray], Values], unit: np.ndarray, resamples: int, tick: Tick | None = None
) -> dict[str, list[float] | None]:
    """Intervals of what `statistic` makes of the times (N,) an image is drawn; None: mostly undefined; {}: one unit."""
    count = int(unit.max()) + 1
    if count < 2:
        return {}
    rng, drawn = np.random.default_rng(SEED), list[Values]()
    for _ in range(resamples):
        times = np.bincount(rng.integers(count, size=count), minlength=count)
        drawn.append(statistic(times[unit]))
        if tick:
            tick(1)
    spans: dict[str, list[float] | None] = {}
    for name in drawn[0] if drawn else ():
        defined = [value for values in drawn if (value := values[name]) is not None]
        ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        spans[name] = None if 2 * len(defined) < len(drawn) else np.quantile(defined, ends).tolist()
    return spans


def _notes(whole: Answers, known: Answers, results: dict[str, Any], trained_on: Sequence[str]) -> list[str]:
    """What a reader must know: sentences for the page, the terminal and the JSON file."""
    counts, facts = results["images"], results["bootstrap"]
    count, unit, resamples = facts["units"], facts["unit"], facts["resamples"]
    missing = [name for name, values in results["per_class"].items() if not values["images"]]
    again = [site for site in results["sites"] if site in trained_on]
    same = len(known.rows) > 1 and float(np.ptp(known.probabilities, axis=0).max()) < SAME
    said = [  # (when, what)
        (counts["unknown_class"], "Left out: images of classes that the model does not know "
         f"({', '.join(counts['unknown_classes'])}), {counts['unknown_class']:,}; counted as wrong, they make the "
         f"accuracy {float(whole.right.mean()):.3f}."),
        (counts["unlabelled"], f"Left out: images without a label, {counts['unlabelled']:,}."),
        (counts["unreadable"], f"Left out, and named below: images that cannot be read, {counts['unreadable']:,}."),
        (missing, f"No image is of class {', '.join(missing)}: its recall, AUROC and average precision are empty, and "
         "means over classes leave it out."),
        *((True, f"{METRICS[name]} is undefined: {reason}.") for name, reason in results["undefined"].items()),
        (same, "All images get the same probabilities, as identical images do: confidence, calibration and the share "
         "unlike training mean nothing here."),
        (count < 2, f"A single {unit.removesuffix('s')} was scored: there is no interval."),
        (count > 1 and not resamples, "No intervals: --resamples 0."),
        (resamples, f"Intervals are 95 % percentile intervals of {resamples:,} resamples over {count:,} {unit}."),
        (resamples and unit == "images", "No patient or slide is known, so images are resampled as if they were "
         "independent; if several show one patient, the true intervals are wider. The column group of a manifest names "
         "patients."),
        (resamples and unit == "patients" and count < FEW_PATIENTS,
         f"{count} patients are few: the intervals are rough, and probably too narrow."),
        (resamples and not facts["resamples_ranked"],
         "AUROC and average precision have no interval: too many images and classes for the resamples."),
        (again, f"The model was trained on sites of the same name ({', '.join(again)}): if the images are the same, "
         "their scores are too optimistic."),
    ]  # fmt: skip
    first = [expected_line(results["expected"])] if results["expected"] else []
    return first + [sentence for when, sentence in said if when]


def most_wrong(answers: Answers, count: int) -> np.ndarray:
    """Positions (K,) of the wrong predictions with the highest confidence first, among known classes."""
    wrong = np.flatnonzero(~answers.right)
    return wrong[np.argsort(-answers.confidence[wrong], kind="stable")[:count]]

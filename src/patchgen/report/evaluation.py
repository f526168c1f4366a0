"""The page of `patchgen evaluate`: the metrics and their basis, the figures, and the most confident mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.draw.overlay import NOTICE, original
from patchgen.draw.plots import Drawn
from patchgen.draw.sheet import mask_over
from patchgen.pages.page import Cell, Picture, data_address, render
from patchgen.predict.evaluate import METRICS

SIDE = 256  # pixels of a picture's longer side
MOST_LINES = 200  # of patients or broken images on the page; the JSON file has all of them
BINARY = {
    "prevalence": "share of images",
    "recall": "sensitivity (recall)",
    "specificity": "specificity",
    "precision": "precision",
    "f1": "F1",
    "auroc": "AUROC",
    "average_precision": "average precision",
}
LIMITS = (
    "These numbers describe these images. They carry over only to similar images: the same "
    "site, patients and classes in the same shares. A selection map is not an annotation, and nothing here is "
    "validated for clinical use."
)


def render_page(found: Mapping[str, Any], figures: Mapping[str, Drawn], pictures: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        found: The content of metrics.json.
        figures: The confusion matrix and the reliability plot by name.
        pictures: Path of a wrong image -> its picture as a data address.
    """
    sites, scored = list(found["sites"]), found["images"]["scored"]
    return render(
        "evaluation.html",
        title=f"How good is {found['model']}?",
        lead=f"{scored:,} labelled images of {_few(sites)}, predicted by {found['method']} ({found['checkpoint']}).",
        found=found,
        figures=figures,
        limits=LIMITS,
        headline=_headline(found),
        binary=[(text, shown(found["binary"][name]), span(found["binary_intervals"].get(name)))
                for name, text in BINARY.items()] if found["binary"] else [],
        classes=_classes(found["per_class"]),
        calibration=_calibration(found),
        sites=_sites(found),
        patients=_patients(found) if found["patients"] else None,
        wrong=_wrong(found["most_wrong"], pictures),
        notice=NOTICE,
        has_maps=any(one["selection"] for one in found["most_wrong"]),
        unreadable=[(one["path"], one["reason"]) for one in found["unreadable"][:MOST_LINES]],
        most_lines=MOST_LINES,
    )  # fmt: skip


def picture(path: Path, mask: np.ndarray | None) -> str:
    """[image | mask over it], or the image alone, as a JPEG inside a data address."""
    from PIL import Image

    image = Image.fromarray(original(path))
    image.thumbnail((SIDE, SIDE))
    image = image.resize(tuple(round(side * SIDE / max(image.size)) for side in image.size))  # type: ignore[arg-type]
    if mask is not None:
        both = Image.new("RGB", (2 * image.width + 4, image.height), "white")
        both.paste(image, (0, 0))
        both.paste(mask_over(image, mask), (image.width + 4, 0))
        image = both
    return data_address(image, "JPEG")


def shown(value: float | None, digits: int = 3) -> str:
    """A number, or a dash if it is undefined."""
    return "–" if value is None else f"{value:.{digits}f}"


def span(interval: Sequence[float] | None) -> str:
    return "–" if not interval else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more sites" if len(names) > most else "")


def _headline(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = [(METRICS[name], shown(value), span(found["intervals"].get(name)))
            for name, value in found["metrics"].items()]  # fmt: skip
    if found["patients"]:
        own = shown(found["patients"]["accuracy"]), span(found["intervals"].get("patient_accuracy"))
        rows.insert(1, ("accuracy, each patient counting once", *own))
    return rows


def _classes(per_class: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    names = ("precision", "recall", "f1", "auroc", "average_precision")
    return [(name, f"{one['images']:,}", *(shown(one[key]) for key in names)) for name, one in per_class.items()]


def _calibration(found: Mapping[str, Any]) -> str:
    error, sure, accuracy = (found["metrics"][name] for name in ("calibration_error", "mean_confidence", "accuracy"))
    way = "above" if sure > accuracy else "below"
    return (
        f"The mean confidence is {abs(sure - accuracy):.3f} {way} the accuracy; the expected calibration error over "
        f"{len(found['reliability'])} bins is {error:.3f}. Below the dashed line the model is overconfident, above it "
        "underconfident."
    )


def _sites(found: Mapping[str, Any]) -> dict[str, Any]:
    """Heading, rows and whether a site has the name of one of training."""
    unit = found["bootstrap"]["unit"]
    names = ("balanced_accuracy", "macro_f1", "auroc", "calibration_error", "unlike_training")
    head = ["site", "images", *([unit] if unit == "patients" else []), "accuracy", "95 % interval", "balanced accuracy"]
    head += ["macro F1", "AUROC", "calibration error", "unlike training"]
    rows = []
    for name, one in found["sites"].items():
        patients = [f"{one['units']:,}"] if unit == "patients" else []
        first = [name + " *" * one["in_training"], f"{one['images']:,}", *patients]
        rows.append([*first, shown(one["accuracy"]), span(one["accuracy_interval"]), *(shown(one[n]) for n in names)])
    starred = any(one["in_training"] for one in found["sites"].values())
    return {"unit": unit, "head": head, "rows": rows, "starred": starred}


def _patients(found: Mapping[str, Any]) -> dict[str, Any]:
    """A summary of all patients, and a row for each, the worst first."""
    patients = found["patients"]
    text = f"Mean accuracy over {patients['patients']:,} patients {patients['accuracy']:.3f}, "
    text += f"worst {patients['worst']:.3f}."
    if "one_label" in patients:
        vote = patients["one_label"]
        text += (
            f" Of {vote['patients']:,} patients with one label, {vote['majority']:.3f} are right by the majority of "
            f"their images and {vote['mean_probability']:.3f} by the mean probability."
        )
    lines = sorted(patients["each"].items(), key=lambda pair: (pair[1]["accuracy"], pair[0]))
    rows = [(name, f"{one['images']:,}", shown(one["accuracy"]), ", ".join(one["labels"]), one["label"])
            for name, one in lines[:MOST_LINES]]  # fmt: skip
    return {"text": text, "rows": rows, "cut": len(lines) > MOST_LINES}


def _wrong(wrong: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> list[Picture]:
    made = []
    for one in wrong:
        lines = [
            [Cell(f"{one['label']} {one['confidence']:.1%}", "wrong strong"),
             Cell(f"true class: {one['truth']} {one['truth_probability']:.1%}")],
            [Cell(one["path"])],
            *([[Cell(f"patient {one['group']}")]] if one["group"] else []),
            *([[Cell(one["selection"], "quiet")]] if one["selection"] else []),
        ]  # fmt: skip
        alt = f"{one['path']}: predicted {one['label']}, true class {one['truth']}"
        made.append(Picture(pictures[one["path"]], alt, lines))
    return made

"""The page and the figures of `patchgen evaluate`: metrics, confusion, reliability, the most confident mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.text import printable
from patchgen.draw.overlay import NOTICE, original
from patchgen.draw.plots import PALETTE, Drawn, Row, new_figure, plain
from patchgen.draw.sheet import mask_over
from patchgen.pages.page import Cell, Picture, data_address, render
from patchgen.predict.evaluate import METRICS

SIDE = 256  # pixels of a picture's longer side
MOST_LINES = 200  # of patients or broken images on the page; the JSON file has all of them
MOST_NUMBERS, MOST_NAMES = 25, 60  # classes up to which cells have numbers, and rows and columns their names
LONGEST = 24  # characters of a class name in a figure
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


def render_page(evaluation: Mapping[str, Any], figures: Mapping[str, Drawn], pictures: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        evaluation: The content of metrics.json.
        figures: The confusion matrix and the reliability plot by name.
        pictures: Path of a wrong image -> its picture as a data address.
    """
    sites, scored = list(evaluation["sites"]), evaluation["images"]["scored"]
    return render(
        "evaluation.html",
        title=f"How good is {evaluation['model']}?",
        lead=f"{scored:,} labelled images of {_few(sites)}, predicted by {evaluation['method']} "
        f"({evaluation['checkpoint']}).",
        evaluation=evaluation,
        figures=figures,
        limits=LIMITS,
        headline=_headline(evaluation),
        binary=[(text, shown(evaluation["binary"][name]), span(evaluation["binary_intervals"].get(name)))
                for name, text in BINARY.items()] if evaluation["binary"] else [],
        classes=_classes(evaluation["per_class"]),
        calibration=_calibration(evaluation),
        sites=_sites(evaluation),
        patients=_patients(evaluation) if evaluation["patients"] else None,
        wrong=_wrong(evaluation["most_wrong"], pictures),
        notice=NOTICE,
        masks=[(name, *map(shown, pair.values())) for name, pair in evaluation["mask"].items()],
        has_maps=any(one["selection"] for one in evaluation["most_wrong"]),
        unreadable=[(one["path"], one["reason"]) for one in evaluation["unreadable"][:MOST_LINES]],
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


def _headline(evaluation: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = [(METRICS[name], shown(value), span(evaluation["intervals"].get(name)))
            for name, value in evaluation["metrics"].items()]  # fmt: skip
    if evaluation["patients"]:
        own = shown(evaluation["patients"]["accuracy"]), span(evaluation["intervals"].get("patient_accuracy"))
        rows.insert(1, ("accuracy, each patient counting once", *own))
    return rows


def _classes(per_class: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    names = ("precision", "recall", "f1", "auroc", "average_precision")
    return [(name, f"{one['images']:,}", *(shown(one[key]) for key in names)) for name, one in per_class.items()]


def _calibration(evaluation: Mapping[str, Any]) -> str:
    error, sure, accuracy = (
        evaluation["metrics"][name] for name in ("calibration_error", "mean_confidence", "accuracy")
    )
    way = "above" if sure > accuracy else "below"
    return (
        f"The mean confidence is {abs(sure - accuracy):.3f} {way} the accuracy; the expected calibration error over "
        f"{len(evaluation['reliability'])} bins is {error:.3f}. Below the dashed line the model is overconfident, "
        "above it underconfident."
    )


def _sites(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Heading, rows and whether a site has the name of one of training."""
    unit = evaluation["bootstrap"]["unit"]
    names = ("balanced_accuracy", "macro_f1", "auroc", "calibration_error", "unlike_training")
    head = ["site", "images", *([unit] if unit == "patients" else []), "accuracy", "95 % interval", "balanced accuracy"]
    head += ["macro F1", "AUROC", "calibration error", "unlike training"]
    rows = []
    for name, one in evaluation["sites"].items():
        patients = [f"{one['units']:,}"] if unit == "patients" else []
        first = [name + " *" * one["in_training"], f"{one['images']:,}", *patients]
        rows.append([*first, shown(one["accuracy"]), span(one["accuracy_interval"]), *(shown(one[n]) for n in names)])
    starred = any(one["in_training"] for one in evaluation["sites"].values())
    return {"unit": unit, "head": head, "rows": rows, "starred": starred}


def _patients(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """A summary of all patients, and a row for each, the worst first."""
    patients = evaluation["patients"]
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


# Figures


def confusion_figure(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Drawn:
    """Rows true, columns predicted; colours are shares of a row, numbers are images."""
    matrix = np.array(counts, dtype=float)
    total = matrix.sum(1, keepdims=True)
    share = np.divide(matrix, total, out=np.zeros_like(matrix), where=total > 0)
    side = min(2.6 + 0.42 * len(classes), 12.0)
    figure = new_figure(side + 0.9, side)
    axes = figure.subplots()
    drawn = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=axes, shrink=0.8, label="share of the true class's images")
    if len(classes) <= MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(matrix.astype(int)):
            colour = "#fefefe" if share[row, column] > 0.65 else "#101418"  # on the cell, in any theme of the page
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=colour, fontsize=9)
    axes.set(xlabel="predicted", ylabel="true", xticks=[], yticks=[])
    if len(classes) <= MOST_NAMES:
        names, places = [shorten(printable(name)) for name in classes], range(len(classes))
        axes.set_yticks(places, names, parse_math=False, fontsize=9)
        steep = max(map(len, names)) * len(names) > 24
        turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if steep else {}
        axes.set_xticks(places, names, parse_math=False, fontsize=9, **turn)
    axes.spines[:].set_visible(False)
    rows: list[Row] = [
        (true, said, int(matrix[i, j])) for i, true in enumerate(classes) for j, said in enumerate(classes)
    ]
    return Drawn("confusion", "Confusion matrix: true classes down, predicted classes across", figure,
                 ("true", "predicted", "images"), rows)  # fmt: skip


def reliability_figure(bins: Sequence[Mapping[str, Any]]) -> Drawn:
    """Accuracy in bins of confidence, and how many images each bin holds."""
    figure = new_figure(5.6, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = [one for one in bins if one["images"]]
    upper.plot([0, 1], [0, 1], linestyle="--", color="#6b7280", linewidth=1, label="perfect calibration")
    upper.plot([one["confidence"] for one in filled], [one["accuracy"] for one in filled], marker="o",
               color=PALETTE[0], label="the model")  # fmt: skip
    upper.set(ylabel="accuracy", ylim=(-0.02, 1.02), xlim=(0, 1))
    upper.legend(frameon=False, loc="upper left", fontsize=9)
    width = bins[0]["high"] - bins[0]["low"]
    lower.bar([one["low"] for one in bins], [one["images"] for one in bins], width, align="edge", color="#c3cad1",
              edgecolor="white")  # fmt: skip
    lower.set(xlabel="confidence", ylabel="images")
    for axes in (upper, lower):
        plain(axes)
    header = ("low", "high", "images", "confidence", "accuracy")
    rows: list[Row] = [["" if one[name] is None else one[name] for name in header] for one in bins]
    return Drawn("reliability", "Accuracy of the answers in bins of their confidence", figure, header, rows)


def shorten(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"

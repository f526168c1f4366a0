"""The page of `patchgen evaluate`: the numbers, what they rest on, the figures, and the surest mistakes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.text import printable
from patchgen.draw.overlay import NOTICE, original
from patchgen.draw.plots import Drawn
from patchgen.draw.sheet import mask_over
from patchgen.predict.evaluate import METRICS
from patchgen.report import page

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
    "These numbers describe these images. They hold for other images as far as those are like these: the same "
    "site, patients and classes in the same shares. A selection map is not an annotation, and nothing here is "
    "validated for clinical use."
)


def render(found: Mapping[str, Any], figures: Mapping[str, Drawn], pictures: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        found: What metrics.json holds.
        figures: The confusion matrix and the reliability plot by name.
        pictures: Path of a wrong image -> its picture as a data address.
    """
    sites, scored = list(found["sites"]), found["images"]["scored"]
    lead = f"{scored:,} labelled images of {_few(sites)}, read by {found['method']} ({found['checkpoint']})."
    sections = [
        ("Scores", _headline(found)),
        ("What they rest on", "<ul>" + "".join(f"<li>{_text(note)}</li>" for note in found["notes"]) + "</ul>"),
        *([(f"{printable(found['positive'])} against the rest", _binary(found))] if found["binary"] else []),
        ("Classes", _figure(figures["confusion"]) + _classes(found["per_class"])),
        ("Calibration", _calibration(found, figures["reliability"])),
        ("Sites", _sites(found)),
        *([("Patients", _patients(found))] if found["patients"] else []),
        ("Most confidently wrong", _wrong(found["most_wrong"], pictures)),
        *([("Unreadable images", _unreadable(found["unreadable"]))] if found["unreadable"] else []),
        ("Limits", f'<p class="note">{escape(LIMITS)}</p>'),
    ]
    return page.page(f"How good is {printable(found['model'])}?", printable(lead), sections)


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
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def shown(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where it is undefined."""
    return "–" if value is None else f"{value:.{digits}f}"


def span(interval: Sequence[float] | None) -> str:
    return "–" if not interval else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _text(text: object) -> str:
    return escape(printable(text))


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more sites" if len(names) > most else "")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table of ready cells; `numbers`: all columns but the first hold numbers, which are not broken."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = "wide numbers" if numbers else "wide"
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(drawn: Drawn) -> str:
    return page.svg(drawn.figure, drawn.description)


def _headline(found: Mapping[str, Any]) -> str:
    rows = [(METRICS[name], shown(value), span(found["intervals"].get(name)))
            for name, value in found["metrics"].items()]  # fmt: skip
    if found["patients"]:
        own = shown(found["patients"]["accuracy"]), span(found["intervals"].get("patient_accuracy"))
        rows.insert(1, ("accuracy, each patient counting once", *own))
    return _table(("", "value", "95 % interval"), rows)


def _binary(found: Mapping[str, Any]) -> str:
    rows = [(text, shown(found["binary"][name]), span(found["binary_intervals"].get(name)))
            for name, text in BINARY.items()]  # fmt: skip
    text = f"{printable(found['positive'])} is predicted where it is the likeliest class."
    return _table(("", "value", "95 % interval"), rows) + _note(text)


def _classes(per_class: Mapping[str, Mapping[str, Any]]) -> str:
    names = ("precision", "recall", "f1", "auroc", "average_precision")
    rows = [(name, f"{one['images']:,}", *(shown(one[key]) for key in names)) for name, one in per_class.items()]
    head = ("class", "images", "precision", "recall", "F1", "AUROC", "average precision")
    return _table(head, rows) + _note("Each class against all others; – is undefined, for want of images.")


def _calibration(found: Mapping[str, Any], drawn: Drawn) -> str:
    error, sure, accuracy = (found["metrics"][name] for name in ("calibration_error", "mean_confidence", "accuracy"))
    way = "more" if sure > accuracy else "less"
    text = (
        f"The model is {abs(sure - accuracy):.3f} {way} sure on average than it is right; the expected calibration "
        f"error over {len(found['reliability'])} bins is {error:.3f}. Below the dashed line it is too sure, above it "
        "not sure enough."
    )
    return f"<p>{escape(text)}</p>" + _figure(drawn)


def _sites(found: Mapping[str, Any]) -> str:
    unit = found["bootstrap"]["unit"]
    names = ("balanced_accuracy", "macro_f1", "auroc", "calibration_error", "unlike_training")
    head = ["site", "images", *([unit] if unit == "patients" else []), "accuracy", "95 % interval", "balanced accuracy"]
    head += ["macro F1", "AUROC", "calibration error", "unlike training"]
    rows = []
    for name, one in found["sites"].items():
        patients = [f"{one['units']:,}"] if unit == "patients" else []
        first = [name + " *" * one["in_training"], f"{one['images']:,}", *patients]
        rows.append([*first, shown(one["accuracy"]), span(one["accuracy_interval"]), *(shown(one[n]) for n in names)])
    text = f"Intervals over the {unit} of a site. Unlike training: share of images that the model flags as unfamiliar; "
    text += "– where it cannot tell."
    if any(one["in_training"] for one in found["sites"].values()):
        text += " *: a site of training has this name."
    return _table(head, rows) + _note(text)


def _patients(found: Mapping[str, Any]) -> str:
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
    cut = f"The {MOST_LINES} with the lowest accuracy; metrics.json has all. " if len(lines) > MOST_LINES else ""
    table = _table(("patient", "images", "accuracy", "true", "by mean probability"), rows, numbers=False)
    return (
        f"<p>{escape(text)}</p><details><summary>Each patient, the worst first</summary>{_note(cut)}{table}</details>"
    )


def _wrong(wrong: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> str:
    if not wrong:
        return "<p>No scored image was wrong, or none was asked for.</p>"
    figures = []
    for one in wrong:
        caption = (
            f'<strong class="wrong">{_text(one["label"])} {one["confidence"]:.1%}</strong>, truly '
            f"<strong>{_text(one['truth'])}</strong> {one['truth_probability']:.1%}<br>{_text(one['path'])}"
            + (f"<br>patient {_text(one['group'])}" if one["group"] else "")
            + (f'<br><span class="note">{_text(one["selection"])}</span>' if one["selection"] else "")
        )
        alt = f"{one['path']}: predicted {one['label']}, truly {one['truth']}"
        figures.append((pictures[one["path"]], printable(alt), caption))
    note = f"Beside each image its map, yellow 1, purple 0: {NOTICE}." if any(o["selection"] for o in wrong) else ""
    return _note(note or "The method has no mask, so there is no map.") + page.gallery(figures)


def _unreadable(unreadable: Sequence[Mapping[str, str]]) -> str:
    rows = [(one["path"], one["reason"]) for one in unreadable[:MOST_LINES]]
    cut = f"The first {MOST_LINES} of {len(unreadable):,}." if len(unreadable) > MOST_LINES else ""
    return _table(("image", "reason"), rows, numbers=False) + _note(cut)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""

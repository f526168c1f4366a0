"""The page and the figures of `patchgen evaluate`: metrics, confusion, reliability, the most confident mistakes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import write_csv, write_text
from patchgen.common.text import json_text, printable
from patchgen.draw.overlay import NOTICE, mask_reading, original
from patchgen.draw.plots import PALETTE, Drawn, Row, new_figure, plain
from patchgen.draw.sheet import side_by_side
from patchgen.pages.page import Cell, Picture, data_address, render, write_page
from patchgen.predict.answers import Answers
from patchgen.predict.evaluate import METRICS, most_wrong
from patchgen.predict.predictor import Predictor, Unreadable

SIDE = 256  # pixels of a picture's longer side
MOST_LINES = 200  # of patients or broken images on the page; the JSON file has all of them
MOST_NUMBERS, MOST_NAMES = 25, 60  # classes up to which cells have numbers, and rows and columns their names
LONGEST = 24  # characters of a class name in a figure
BINARY = {
    "prevalence": "share of images", "recall": "sensitivity (recall)", "specificity": "specificity",
    "precision": "precision", "f1": "F1", "auroc": "AUROC", "average_precision": "average precision",
}  # fmt: skip


def write_evaluation(metrics: dict[str, Any], answers: Answers, predictor: Predictor, out: Path, wrong: int) -> None:
    """All files of the folder; adds the lists of wrong (so many) and of unreadable images to `metrics`."""
    out.mkdir(parents=True, exist_ok=True)
    metrics["most_wrong"], pictures = _wrong_images(answers.known(), predictor, wrong)
    metrics["unreadable"] = [{"path": str(image.path), "reason": image.reason} for image in answers.unreadable]
    drawn = _confusion_figure(metrics["classes"], metrics["confusion"]), _reliability_figure(metrics["reliability"])
    for figure in drawn:
        figure.save(out)
    lines = _table(answers)
    write_csv(out / "images.csv", next(lines), lines, people=True)
    write_text(out / "metrics.json", json_text(metrics) + "\n")
    write_page(out / "index.html", _render_page(metrics, {figure.name: figure for figure in drawn}, pictures))


def _wrong_images(answers: Answers, predictor: Predictor, count: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The most confident mistakes with their masks, and path -> picture; masks are recomputed only for these."""
    places = most_wrong(answers, count).tolist()
    table, entries, pictures = answers.table, list[dict[str, Any]](), dict[str, str]()
    files = [table.file(int(answers.rows[i])) for i in places]
    for i, file, again in zip(places, files, predictor.predict(files), strict=True):
        if isinstance(again, Unreadable):  # removed since it was scored
            continue
        row = int(answers.rows[i])
        entries.append({
            "path": table.paths[row],
            "site": table.domains[table.domain[row]],
            "group": table.group[row] if table.group else "",
            "truth": table.label_name(row),
            "truth_probability": float(answers.probabilities[i, answers.label[i]]),
            "label": answers.classes[answers.predicted[i]],
            "confidence": float(answers.confidence[i]),
            "selection": None if again.mask is None else mask_reading(again.mask),
        })  # fmt: skip
        pictures[table.paths[row]] = _picture(file, again.mask)
    return entries, pictures


def _table(answers: Answers) -> Iterator[list[str]]:
    """The heading, one line per image that was read, then one per image that could not be."""
    table, predicted, right, confidence = answers.table, answers.predicted, answers.right, answers.confidence
    flag = [] if answers.unlike is None else ["unlike_training"]
    classes = (f"p_{printable(name)}" for name in answers.classes)
    head = ["path", "site", "group", "truth", "label", "right", "confidence", *flag, *classes, "note"]
    yield head
    for i, row in enumerate(answers.rows.tolist()):
        unlike = [] if answers.unlike is None else [str(bool(answers.unlike[i])).lower()]
        note = "" if answers.label[i] >= 0 else "not scored: the model does not know this class"
        cells = [table.paths[row], table.domains[table.domain[row]], table.group[row] if table.group else "",
                 table.label_name(row), answers.classes[predicted[i]], str(bool(right[i])).lower(),
                 f"{confidence[i]:.6f}", *unlike, *(f"{p:.6f}" for p in answers.probabilities[i]), note]  # fmt: skip
        yield [printable(cell) for cell in cells]
    for image in answers.unreadable:
        yield [printable(image.path), *[""] * (len(head) - 2), printable(f"not scored: {image.reason}")]


def _render_page(evaluation: Mapping[str, Any], figures: Mapping[str, Drawn], pictures: Mapping[str, str]) -> str:
    """The whole page, from the content of metrics.json, figures by name, and pictures of the wrong images by path."""
    patients, classes = evaluation["patients"], ("precision", "recall", "f1", "auroc", "average_precision")
    headline = [(METRICS[name], shown(value), span(evaluation["intervals"].get(name)))
                for name, value in evaluation["metrics"].items()]  # fmt: skip
    if patients:
        interval = span(evaluation["intervals"].get("patient_accuracy"))
        headline.insert(1, ("accuracy, each patient counting once", shown(patients["accuracy"]), interval))
    return render(
        "evaluation.html",
        title=f"How good is {evaluation['model']}?",
        evaluation=evaluation,
        figures=figures,
        headline=headline,
        binary=[(text, shown(evaluation["binary"][name]), span(evaluation["binary_intervals"].get(name)))
                for name, text in BINARY.items()] if evaluation["binary"] else [],
        classes=[(name, f"{scores['images']:,}", *(shown(scores[key]) for key in classes))
                 for name, scores in evaluation["per_class"].items()],
        sites=_sites(evaluation),
        patients=patients and sorted(patients["each"].items(), key=lambda pair: (pair[1]["accuracy"], pair[0])),
        wrong=[_wrong(image, pictures[image["path"]]) for image in evaluation["most_wrong"]],
        notice=NOTICE,
        masks=[(name, *map(shown, pair.values())) for name, pair in evaluation["mask"].items()],
        most_lines=MOST_LINES,
        shown=shown,
    )  # fmt: skip


def _picture(path: Path, mask: np.ndarray | None) -> str:
    """[image | mask over it], or the image alone, as a JPEG inside a data address."""
    from PIL import Image

    image = Image.fromarray(original(path))
    image.thumbnail((SIDE, SIDE))
    image = image.resize(tuple(round(side * SIDE / max(image.size)) for side in image.size))  # type: ignore[arg-type]
    return data_address(side_by_side(image, [] if mask is None else [mask], 4), "JPEG")


def shown(value: float | None) -> str:
    """A number, or a dash if it is undefined."""
    return "–" if value is None else f"{value:.3f}"


def span(interval: Sequence[float] | None) -> str:
    return "–" if not interval else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _sites(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Heading, rows and whether a site has the name of one of training."""
    unit, sites = evaluation["bootstrap"]["unit"], evaluation["sites"]
    names = ("balanced_accuracy", "macro_f1", "auroc", "calibration_error", "unlike_training")
    head = ["site", "images", "patients", "accuracy", "95 % interval", "balanced accuracy", "macro F1", "AUROC",
            "calibration error", "unlike training"]  # fmt: skip
    rows = [[name + " *" * site["in_training"], f"{site['images']:,}", f"{site['units']:,}", shown(site["accuracy"]),
             span(site["accuracy_interval"]), *(shown(site[metric]) for metric in names)]
            for name, site in sites.items()]  # fmt: skip
    for line in [head, *rows] if unit != "patients" else ():
        del line[2]
    return {"unit": unit, "head": head, "rows": rows, "starred": any(site["in_training"] for site in sites.values())}


def _wrong(image: Mapping[str, Any], source: str) -> Picture:
    lines = [
        [Cell(f"{image['label']} {image['confidence']:.1%}", "wrong strong"),
         Cell(f"true class: {image['truth']} {image['truth_probability']:.1%}")],
        [Cell(image["path"])],
        *([[Cell(f"patient {image['group']}")]] if image["group"] else []),
        *([[Cell(image["selection"], "quiet")]] if image["selection"] else []),
    ]  # fmt: skip
    return Picture(source, f"{image['path']}: predicted {image['label']}, true class {image['truth']}", lines)


# Figures


def _confusion_figure(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Drawn:
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
        names, places = [printable(name) for name in classes], range(len(classes))
        names = [name if len(name) <= LONGEST else name[: LONGEST - 1] + "…" for name in names]
        axes.set_yticks(places, names, parse_math=False, fontsize=9)
        steep = max(map(len, names)) * len(names) > 24
        turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if steep else {}
        axes.set_xticks(places, names, parse_math=False, fontsize=9, **turn)
    axes.spines[:].set_visible(False)
    rows: list[Row] = [(classes[i], classes[j], int(count)) for (i, j), count in np.ndenumerate(matrix)]
    return Drawn("confusion", "Confusion matrix: true classes down, predicted classes across", figure,
                 ("true", "predicted", "images"), rows)  # fmt: skip


def _reliability_figure(bins: Sequence[Mapping[str, Any]]) -> Drawn:
    """Accuracy in bins of confidence, and how many images each bin holds."""
    figure = new_figure(5.6, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = [each for each in bins if each["images"]]
    upper.plot([0, 1], [0, 1], linestyle="--", color="#6b7280", linewidth=1, label="perfect calibration")
    confidence, accuracy = ([each[name] for each in filled] for name in ("confidence", "accuracy"))
    upper.plot(confidence, accuracy, marker="o", color=PALETTE[0], label="the model")
    upper.set(ylabel="accuracy", ylim=(-0.02, 1.02), xlim=(0, 1))
    upper.legend(frameon=False, loc="upper left", fontsize=9)
    width = bins[0]["high"] - bins[0]["low"]
    low, images = ([each[name] for each in bins] for name in ("low", "images"))
    lower.bar(low, images, width, align="edge", color="#c3cad1", edgecolor="white")
    lower.set(xlabel="confidence", ylabel="images")
    for axes in (upper, lower):
        plain(axes)
    header = ("low", "high", "images", "confidence", "accuracy")
    rows: list[Row] = [["" if each[name] is None else each[name] for name in header] for each in bins]
    return Drawn("reliability", "Accuracy of the answers in bins of their confidence", figure, header, rows)

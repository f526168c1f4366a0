"""The page of `patchgen demo`: scores, curves, and images of the unseen domain with their masks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchgen.common.text import number_text
from patchgen.common.untrusted import read_json
from patchgen.data.oracle import true_masks
from patchgen.data.table import read_table
from patchgen.draw.overlay import original
from patchgen.draw.plots import PALETTE, Drawn, Row, new_figure, percent_axis, plain
from patchgen.draw.sheet import side_by_side
from patchgen.methods import make_method
from patchgen.methods.build import build_model
from patchgen.pages.page import Cell, Picture, data_address, render
from patchgen.predict.predictor import Prediction, Predictor, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import score_record, selected_evaluation, source_validation

MASKED = "patchgen"  # whose masks the page shows
SHOWN = 9  # images on the page
SCALE = 2  # enlarges them
SCORES = {
    "method": "method", "unseen": "unseen domain %", "sources": "sources, held out %", "auroc": "mask AUROC",
    "untrained_auroc": "untrained", "iou": "IoU at 0.5", "untrained_iou": "untrained",
    "kept": "predictive patches kept %", "untrained_kept": "untrained %",
}  # fmt: skip
MASKS = {"method": "method", "unseen": "learned mask %", "true_mask": "true mask %", "random_mask": "random mask %"}
CURVES = {"training loss": "training loss (cross-entropy)", "validation loss": "loss on source validation",
          "mask AUROC": "mask AUROC (sources)"}  # fmt: skip
STATISTICS = ("mean", "spread", "auroc", "iou", "error", "kept")  # of a mask, trained and untrained


def scores(runs: Mapping[str, RunFolder]) -> list[dict[str, Any]]:
    """The content of the tables, a row per run: fractions, None if a run has no such number."""
    rows = []
    for label, run in runs.items():
        test = score_record(run)
        mask, replaced = test.get("mask", {}), [test.get(f"{kind}_mask", {}) for kind in ("true", "random")]
        rows.append({
            "method": label, "unseen": test["all"]["accuracy"], "images": test["all"]["images"],
            "sources": source_validation(selected_evaluation(run), "accuracy"),
            **{part + name: mask.get(part + name) for part in ("", "untrained_") for name in STATISTICS},
            "true_mask": replaced[0].get("accuracy"), "random_mask": replaced[1].get("accuracy"),
        })  # fmt: skip
    return rows


def cells(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[list[str]]:
    """The rows as text: per cent where the heading says so."""
    return [[number_text(row[key], "%" in heading) for key, heading in columns.items()] for row in rows]


def render_page(runs: Mapping[str, RunFolder], smoke: bool) -> str:
    rows = scores(runs)
    masked = [row for row in rows if row["true_mask"] is not None]
    return render(
        "demo.html",
        title="PatchGen where the shortcut breaks",
        smoke=smoke,
        images=rows[0]["images"],
        error=100 * max((row["unseen"] * (1 - row["unseen"]) / row["images"]) ** 0.5 for row in rows),
        bars=bars(rows),
        curves=curves(runs),
        score_head=list(SCORES.values()),
        score_rows=cells(rows, SCORES),
        mask_head=list(MASKS.values()),
        mask_rows=cells(masked, MASKS),
        masked=MASKED,
        pictures=pictures(runs),
    )


def curves(runs: Mapping[str, RunFolder]) -> Drawn:
    """Training and validation loss over the steps, and the mask's AUROC if the truth is known."""
    rows: list[Row] = []
    for label, run in runs.items():
        for record in run.records("evaluation"):
            losses = [domain["loss"] for domain in record["validation"].values()]
            values = {"training loss": record["train"]["main"], "validation loss": float(np.mean(losses)),
                      "mask AUROC": record.get("mask", {}).get("auroc")}  # fmt: skip
            rows += [(label, name, record["step"], value) for name, value in values.items() if value is not None]
    rows.sort(key=lambda row: (list(runs).index(row[0]), list(CURVES).index(row[1])))
    names = [name for name in CURVES if any(row[1] == name for row in rows)]
    figure = new_figure(3.5 * len(names) if len(names) > 2 else 7.5, 3)
    panels = figure.subplots(1, len(names))
    for panel, name in zip(panels, names, strict=True):
        for label, colour in zip(runs, PALETTE, strict=False):
            if points := [row[2:] for row in rows if row[:2] == (label, name)]:
                panel.plot(*zip(*points, strict=True), color=colour, label=label)
        panel.set(title=CURVES[name], xlabel="step")
        plain(panel)
    panels[0].legend(frameon=False)
    if "mask AUROC" in names:
        panels[2].set(ylim=(0, 1))
        panels[2].axhline(0.5, color="#9aa3ad", linewidth=0.8, linestyle=":")
    return Drawn("curves", "Loss and mask AUROC over the training steps", figure, ("method", "what", "step", "value"),
                 rows)  # fmt: skip


def bars(rows: Sequence[Mapping[str, Any]]) -> Drawn:
    """Accuracy on the sources and on the unseen domain, method by method."""
    figure = new_figure(4.9, 0.55 * len(rows) + 1.1)  # inches: readable on a phone as it is
    axes = figure.subplots()
    places = np.arange(len(rows))[::-1]
    data: list[Row] = []
    series = ((0.2, "sources", "#c3cad1", "sources, held out"), (-0.2, "unseen", "#0072b2", "unseen domain"))
    for shift, key, colour, label in series:
        values = [100 * row[key] for row in rows]
        drawn = axes.barh(places + shift, values, height=0.36, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=9)
        data += [(row["method"], label, value) for row, value in zip(rows, values, strict=True)]
    axes.set(yticks=places, yticklabels=[row["method"] for row in rows], xlabel="accuracy (%)")
    percent_axis(axes, 100)
    plain(axes)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return Drawn("accuracy", "Accuracy on held-out source images and on the unseen domain for each method", figure,
                 ("method", "images", "accuracy (%)"), data)  # fmt: skip


def pictures(runs: Mapping[str, RunFolder]) -> list[Picture]:
    """Unseen images, evenly over the classes, with the prediction of each method."""
    config = runs[MASKED].config
    table = read_table(config.data)
    rows = table.rows_of(config.unseen)
    rows = rows[:: max(1, len(rows) // SHOWN)][:SHOWN]
    paths = [table.file(int(row)) for row in rows]
    predictors = {label: load_run(run.path) for label, run in runs.items()}
    answers = {label: _predictions(predictor, paths) for label, predictor in predictors.items()}
    recorded = read_json(runs[MASKED].path / "env.json")["backbone"]
    classes = predictors[MASKED].classes  # the same model before its first step: its weights follow from the seed
    untrained = build_model(config, make_method(config), len(classes), recorded=recorded)
    start = _predictions(Predictor(untrained, classes, config), paths)
    truth = true_masks(table, predictors[MASKED].model.grid)
    made = []
    for i, row in enumerate(rows.tolist()):
        true, mask = table.classes[table.label[row]], answers[MASKED][i].mask
        known = truth[row].reshape(mask.shape) if truth is not None and mask is not None else None
        photo = Image.fromarray(original(paths[i]))
        photo = photo.resize((SCALE * photo.width, SCALE * photo.height), Image.Resampling.NEAREST)
        masks = [each for each in (known, start[i].mask, mask) if each is not None]
        verdicts = {label: "right" if of_run[i].label == true else "wrong" for label, of_run in answers.items()}
        cells = [Cell(f"{label}: {answers[label][i].label}", word, word) for label, word in verdicts.items()]
        alt = f"image of class {true}, its predictive patches, the untrained mask and the trained one"
        source = data_address(side_by_side(photo, masks, 4 * SCALE))
        made.append(Picture(source, alt, [[Cell(f"class {true}", "strong")], cells]))
    return made


def _predictions(predictor: Predictor, paths: "Sequence[Path]") -> "list[Prediction]":
    return [answer for answer in predictor.predict(paths) if isinstance(answer, Prediction)]

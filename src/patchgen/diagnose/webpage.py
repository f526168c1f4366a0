"""The self-contained page of a diagnosis: the five parts with their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patchgen.common.text import number_text, plus_minus
from patchgen.diagnose.claims import Finding
from patchgen.diagnose.cost import of_module
from patchgen.diagnose.figures import NOTICE, Drawn
from patchgen.pages.page import Cell, data_address, render

VERDICTS = {"yes": "right", "no": "wrong"}
MASKS = {"accuracy": "accuracy %", "selected": "selected %", "min": "mask min", "mean": "mean", "max": "max",
         "auroc": "AUROC", "iou": "IoU", "error": "error", "kept": "kept %"}  # fmt: skip


def render_page(diagnosis: Mapping[str, Any], findings: Sequence[Finding], figures: Mapping[str, Drawn]) -> str:
    """The whole page; `diagnosis` is the content of diagnosis.json."""
    runs = diagnosis["runs"]
    others = ", ".join(name for name in runs if name != diagnosis["main"])
    mask_head, masks = _masks(runs)
    return render(
        "diagnosis.html",
        title=f"Does the mask decide? {diagnosis['main']}" + (f" against {others}" if others else ""),
        diagnosis=diagnosis,
        figures=figures,
        claims=[(each.part, each.claim, Cell(each.verdict, f"whole {VERDICTS.get(each.verdict, '')}"), each.measured)
                for each in findings],
        masks=masks,
        mask_head=mask_head,
        verdicts=[f"{name}: {run['mask']['verdict']}." if run["mask"] else f"{name} has no mask."
                  for name, run in runs.items()],
        perturbations=[drawn for name, drawn in figures.items() if name.startswith("perturbation")],
        with_truth=any(run["auroc"] for run in runs.values()),
        areas=_areas(runs),
        geometry=[_geometry(name, run["geometry"]) for name, run in runs.items()],
        notice=NOTICE.capitalize(),
        overlays=data_address(figures["overlays"]),
        module=of_module(diagnosis["cost"]),
    )  # fmt: skip


def _with_error(value: Mapping[str, float] | None, percent: bool = False) -> str:
    if value is None:
        return "-"
    scale, digits = (100, 1) if percent else (1, 3)
    return plus_minus(scale * value["mean"], scale * value["error"], digits)


def _masks(runs: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows; what is recorded of the untrained masks stands beside the trained ones."""
    control = {name for run in runs.values() for name in run["untrained"]}
    head = [(name, text, mark) for name, text in MASKS.items()
            for mark in ("", ", untrained") if not mark or name in control]  # fmt: skip
    rows = []
    for label, run in runs.items():
        means = {**(run["mask"] or {}), "accuracy": run["accuracy"], "auroc": (run["auroc"] or {}).get("mask")}
        means |= {"selected": run["selected"]} if run["mask"] else {}
        row = [label]
        for name, text, mark in head:
            if mark:
                row.append(number_text(run["untrained"].get(name), text.endswith("%")))
            elif means.get(name) and text in ("accuracy %", "selected %"):
                row.append(_with_error(means[name], True))
            else:
                row.append(number_text(means[name]["mean"] if means.get(name) else None, text.endswith("%")))
        rows.append(row)
    return ["run", *(text + mark for _, text, mark in head)], rows


def _areas(runs: Mapping[str, Any]) -> list[list[str]]:
    """Areas under the insertion and deletion curves, a row per run and ranking."""
    kinds = [(way, which) for which in ("predicted", "true") for way in ("insertion", "deletion")]
    return [
        [name, ranking, *(_with_error(curve[f"{way}_auc"][which]) for way, which in kinds)]
        for name, run in runs.items()
        for ranking, curve in run["curves"].items()
    ]


def _geometry(name: str, numbers: Mapping[str, Any]) -> list[str]:
    apart, knn = numbers["domain_separability"], numbers["knn_across_domains"]
    return [
        name,
        number_text(numbers["silhouette_by_class"]),
        number_text(numbers["silhouette_by_domain"]),
        f"{100 * apart['accuracy']:.1f} (chance {100 * apart['chance']:.1f})" if apart else "-",
        number_text(knn and knn["unseen"], True),
        number_text(knn and knn["mean"], True),
    ]

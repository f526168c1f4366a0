"""The self-contained page of a diagnosis: the five parts with their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patchgen.common.text import number_text, plus_minus
from patchgen.diagnose.claims import Finding
from patchgen.diagnose.cost import of_module
from patchgen.diagnose.figures import NOTICE, Drawn
from patchgen.pages.page import Cell, picture_address, render

VERDICTS = {"yes": "right", "no": "wrong"}
LIMITS = (
    "These numbers describe the trained classifier, on these images and under these perturbations. They do not show "
    "that a mask is the true predictive set, and a map is no diagnosis: no pathology expert reviewed the maps made "
    "here. Backbones trained with images and text may already attend to what the classes mean, which leaves a mask "
    "less room."
)


def render_page(diagnosis: Mapping[str, Any], verdicts: Sequence[Finding], figures: Mapping[str, Drawn]) -> str:
    """The whole page; `diagnosis` is the content of diagnosis.json."""
    names = " against ".join([diagnosis["main"], ", ".join(list(diagnosis["runs"])[1:])]).removesuffix(" against ")
    lead = (
        f"{diagnosis['images']} images of {diagnosis['unseen']!r}, which training did not see; checkpoint "
        f"{diagnosis['checkpoint']}, seed {diagnosis['seed']}. Figures with their data (PNG, SVG, CSV), records.jsonl "
        "and diagnosis.json are in the folder of this page."
    )
    return render(
        "diagnosis.html",
        title=f"Does the mask decide? {names}",
        lead=lead,
        diagnosis=diagnosis,
        figures=figures,
        claims=[(one.part, one.claim, Cell(one.verdict, f"whole {VERDICTS.get(one.verdict, '')}"), one.measured)
                for one in verdicts],
        masks=_masks(diagnosis)[1],
        mask_head=_masks(diagnosis)[0],
        verdicts=[f"{name}: {run['mask']['verdict']}." if run["mask"] else f"{name} has no mask."
                  for name, run in diagnosis["runs"].items()],
        perturbations=[drawn for name, drawn in figures.items() if name.startswith("perturbation")],
        with_truth=any(run["auroc"] for run in diagnosis["runs"].values()),
        areas=_areas(diagnosis),
        geometry=_geometry(diagnosis),
        notice=NOTICE.capitalize(),
        overlays=picture_address(figures["overlays"]),
        cost=_cost(diagnosis["cost"]),
        limits=LIMITS,
    )  # fmt: skip


def _with_error(value: Mapping[str, float] | None, percent: bool = False) -> str:
    if value is None:
        return "-"
    scale, digits = (100, 1) if percent else (1, 3)
    return plus_minus(scale * value["mean"], scale * value["error"], digits)


MASKS = {"accuracy": "accuracy %", "selected": "selected %", "min": "mask min", "mean": "mean", "max": "max",
         "auroc": "AUROC", "iou": "IoU", "error": "error", "kept": "kept %"}  # fmt: skip


def _masks(diagnosis: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows; what is recorded of the untrained masks stands beside the trained ones."""
    runs = diagnosis["runs"]
    control = {name for run in runs.values() for name in run["untrained"]}
    head = [(name, text, mark) for name, text in MASKS.items()
            for mark in ("", ", untrained") if not mark or name in control]  # fmt: skip
    rows = []
    for label, run in runs.items():
        auroc = (run["auroc"] or {}).get("mask")
        values = {**(run["mask"] or {}), "accuracy": run["accuracy"], "auroc": auroc}
        values |= {"selected": run["selected"]} if run["mask"] else {}
        row = [label]
        for name, text, mark in head:
            value = run["untrained"].get(name) if mark else values.get(name)
            if isinstance(value, Mapping) and text in ("accuracy %", "selected %"):
                row.append(_with_error(value, True))
            else:
                row.append(number_text(value["mean"] if isinstance(value, Mapping) else value, text.endswith("%")))
        rows.append(row)
    return ["run", *(text + mark for _, text, mark in head)], rows


def _areas(diagnosis: Mapping[str, Any]) -> list[list[str]]:
    """Areas under the insertion and deletion curves, a row per run and ranking."""
    rows = []
    for name, run in diagnosis["runs"].items():
        for ranking, curve in run["curves"].items():
            areas = [curve[f"{way}_auc"][which] for which in ("predicted", "true") for way in ("insertion", "deletion")]
            rows.append([name, ranking, *map(_with_error, areas)])
    return rows


def _geometry(diagnosis: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, run in diagnosis["runs"].items():
        numbers = run["geometry"]
        apart, knn = numbers["domain_separability"], numbers["knn_across_domains"]
        rows.append([
            name,
            number_text(numbers["silhouette_by_class"]),
            number_text(numbers["silhouette_by_domain"]),
            f"{100 * apart['accuracy']:.1f} (chance {100 * apart['chance']:.1f})" if apart else "-",
            number_text(knn and knn["unseen"], True),
            number_text(knn and knn["mean"], True),
        ])  # fmt: skip
    return rows


def _cost(cost: Mapping[str, Any]) -> str:
    module = of_module(cost)
    return (
        f"{cost['image_size']} px, {cost['patches']} patches, batch {cost['batch']}. The module has "
        f"{module['module_parameters']:,} parameters, {module['module_of_backbone']:.1%} of the backbone. A training "
        f"step has {module['ratio']['flops']:.2f} times the arithmetic (matrix products, forward and backward) and "
        f"{module['ratio']['peak_bytes']:.2f} times the peak memory. These are counted, so they are the same on every "
        "machine; `python -m benchmarks rate` times the steps."
    )

"""The page of a diagnosis: the five parts with what each says, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from patchgen.diagnose.claims import Claim
from patchgen.diagnose.figures import NOTICE, Drawn
from patchgen.report import page

VERDICTS = {"yes": "right", "no": "wrong"}
LIMITS = (
    "These numbers describe the trained classifier, on these images and under these perturbations. They do not show "
    "that a mask is the true predictive set, and a map is no diagnosis: no pathology expert reviewed the maps made "
    "here. Backbones trained with images and text may already attend to what the classes mean, which leaves a mask "
    "less room."
)


def render(found: Mapping[str, Any], verdicts: Sequence[Claim], figures: Mapping[str, Drawn]) -> str:
    """The whole page; `found` is what diagnosis.json holds."""
    sections = [
        ("The paper's five claims, here", _claims(verdicts)),
        ("The masks", _masks(found)),
        ("A. Perturbation", _perturbation(found, figures)),
        ("B. Insertion and deletion", _curves(found, figures)),
        ("C. Geometry of the features", _geometry(found, figures)),
        ("D. Maps side by side", _overlays(figures)),
        ("E. Cost against LP+LN", _cost(found["cost"], figures)),
        ("Limits", _note(LIMITS)),
    ]
    names = " against ".join([found["main"], ", ".join(list(found["runs"])[1:])]).removesuffix(" against ")
    lead = (
        f"{found['images']} images of {found['unseen']!r}, which training did not see; checkpoint "
        f"{found['checkpoint']}, seed {found['seed']}. Figures with their data (PNG, SVG, CSV), records.jsonl and "
        "diagnosis.json lie beside this page."
    )
    return page.page(f"Does the mask decide? {names}", lead, sections)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _svg(drawn: Drawn) -> str:
    return page.svg(drawn.figure, drawn.description)


def _with_error(value: Mapping[str, float] | None, percent: bool = False) -> str:
    if value is None:
        return "-"
    if percent:
        return f"{100 * value['mean']:.1f} ± {100 * value['error']:.1f}"
    return f"{value['mean']:.3f} ± {value['error']:.3f}"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table of ready cells, the first `left` columns flush left."""

    def cells(values: Sequence[str], tag: str) -> str:
        side = ' style="text-align:left"'
        return "".join(f"<{tag}{side if i < left else ''}>{escape(v)}</{tag}>" for i, v in enumerate(values))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(header, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _claims(verdicts: Sequence[Claim]) -> str:
    rows = "".join(
        f'<tr><td>{one.part}</td><td style="text-align:left">{escape(one.claim)}</td>'
        f'<td style="text-align:left;white-space:nowrap" class="{VERDICTS.get(one.verdict, "")}">{one.verdict}</td>'
        f'<td style="text-align:left">{escape(one.measured)}</td></tr>'
        for one in verdicts
    )
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in ("", "claim", "appears", "measured"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" + _note(
        "± is one standard error over the images. A verdict asks for a difference of more than two of them, where "
        "there is an error to be had; so 'no' is also what too few images give."
    )


def _masks(found: Mapping[str, Any]) -> str:
    header = ("run", "accuracy %", "selected %", "mask min", "mean", "max", "AUROC", "IoU", "error", "kept %")
    rows, texts = [], []
    for name, run in found["runs"].items():
        mask = run["mask"] or {}
        auroc = (run["auroc"] or {}).get("mask")
        cells = [page.show(mask[key]["mean"] if mask.get(key) else None, key == "kept") for key in
                 ("min", "mean", "max", "iou", "error", "kept")]  # fmt: skip
        rows.append([name, _with_error(run["accuracy"], True), _with_error(run["selected"], True) if mask else "-",
                     *cells[:3], page.show(auroc["mean"] if auroc else None, False), *cells[3:]])  # fmt: skip
        texts.append(f"{name}: {mask['verdict']}." if mask else f"{name} has no mask.")
    note = (
        "Selected: patches with a mask of at least 0.5. AUROC, IoU, error (mean |m - m*|) and kept (share of the true "
        "patches that are selected) need a known truth."
    )
    return _rows(header, rows) + "".join(f"<p>{escape(text)}</p>" for text in texts) + _note(note)


def _perturbation(found: Mapping[str, Any], figures: Mapping[str, Drawn]) -> str:
    text = (
        "The selected set is {mask >= 0.5}; every other ranking selects as many of its top patches in the same image. "
        f"{found['size_rule']} Filled: the selection is kept and the rest perturbed (high: it suffices). Hollow: the "
        "selection is perturbed and the rest kept (low: it was needed). Blur has the patch's side as sigma, mean is "
        "the image's mean colour, swap is the same place of another image, of any class. At token level (PatchGen) "
        "token-drop sets the mask to 0; token-mean, where the mask acts behind the backbone, puts the mean token."
    )
    drawn = [drawn for name, drawn in figures.items() if name.startswith("perturbation")]
    return f"<p>{escape(text)}</p>" + "".join(_svg(one) for one in drawn)


def _curves(found: Mapping[str, Any], figures: Mapping[str, Drawn]) -> str:
    header = ("run", "ranking", "insertion AUC", "deletion AUC", "insertion, true class", "deletion, true class")
    rows = []
    for name, run in found["runs"].items():
        for ranking, curve in run["curves"].items():
            areas = [curve[f"{way}_auc"][which] for which in ("predicted", "true") for way in ("insertion", "deletion")]
            rows.append([name, ranking, *map(_with_error, areas)])
    text = (
        f"Patches are shown on, or taken from, an image perturbed by {found['operators'][0]}, the most important "
        f"first, in {found['steps']} steps. Probability of the class predicted for the whole image; higher is better "
        "for insertion, lower for deletion."
    )
    if any(run["auroc"] for run in found["runs"].values()):
        text += (
            " Truth, the known patches in random order, is the upper line for a classifier that reads what decides: "
            "compare it in the columns of the true class, because a wrong answer has other reasons."
        )
    return f"<p>{escape(text)}</p>" + _svg(figures["curves"]) + _rows(header, rows, left=2)


def _geometry(found: Mapping[str, Any], figures: Mapping[str, Drawn]) -> str:
    header = ("run", "silhouette by class", "by domain", "domains told apart %", "kNN, unseen %", "kNN, mean %")
    rows = []
    for name, run in found["runs"].items():
        numbers = run["geometry"]
        apart, knn = numbers["domain_separability"], numbers["knn_across_domains"]
        rows.append([
            name,
            page.show(numbers["silhouette_by_class"], False),
            page.show(numbers["silhouette_by_domain"], False),
            f"{100 * apart['accuracy']:.1f} (chance {100 * apart['chance']:.1f})" if apart else "-",
            page.show(knn and knn["unseen"], True),
            page.show(knn and knn["mean"], True),
        ])  # fmt: skip
    text = (
        "Features are what the head reads, for images that were not trained on, of every domain. The picture bends "
        "distances: read the numbers. Told apart: a linear classifier of the domains, five-fold, balanced. kNN: five "
        "neighbours from the other domains, on the unseen one and on each domain in turn."
    )
    return f"<p>{escape(text)}</p>" + _svg(figures["geometry"]) + _rows(header, rows)


def _overlays(figures: Mapping[str, Drawn]) -> str:
    drawn = figures["overlays"]
    buffer = io.BytesIO()
    drawn.figure.savefig(buffer, format="png", dpi=130)
    source = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img style="max-width:100%" src="data:image/png;base64,{source}" alt="{escape(drawn.description)}">'
    return f"<p>{escape(NOTICE.capitalize())}.</p>{image}"


def _cost(cost: Mapping[str, Any], figures: Mapping[str, Drawn]) -> str:
    module, machine = cost["methods"]["patchgen"], cost["machine"]
    ratio = module["ratio"]
    text = (
        f"{cost['image_size']} px, {cost['patches']} patches, batch {cost['batch']}, {machine['device']}, "
        f"{machine['threads']} threads. The module has {module['module_parameters']:,} parameters, "
        f"{module['module_of_backbone']:.1%} of the backbone. A training step takes {ratio['of_medians']:.2f} times as "
        f"long (quartiles {ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f}, floor of the matrix products "
        f"{ratio['floor']:.2f}) and {ratio['peak_bytes']:.2f} times the peak memory."
    )
    if not ratio["conclusive"]:
        text += " The times scatter too much to conclude: measure again on a quiet machine with `patchgen bench step`."
    return _svg(figures["cost"]) + f"<p>{escape(text)}</p>"

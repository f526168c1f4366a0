"""patchgen demo: train and compare on images whose answer is known; a table, and a page with the maps."""

from __future__ import annotations

import json as to_json
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.commands import parse
from patchgen.config import Config

if TYPE_CHECKING:
    import numpy as np

    from patchgen.runs.folder import RunFolder

DATA = "oracle-shortcut"
METHODS = ("lp", "lp-ln", "patchgen", "patchgen-select")
MASKED = "patchgen-select"  # whose masks the page shows
SHOWN = 9  # images on the page

COLUMNS = {
    "method": "method",
    "unseen": "unseen domain %",
    "sources": "sources, held out %",
    "auroc": "mask AUROC",
    "iou": "IoU at 0.5",
    "error": "mask error",
    "kept": "predictive patches kept %",
}
LINES = {"method": "method", "unseen": "learned mask %", "true_mask": "true mask %", "random_mask": "random mask %"}

NEXT = """<p>The same, with your own images in folders <code>site/class/*.jpg</code>:</p>
<pre>patchgen doctor my_images
patchgen benchmark my_images --methods lp-ln patchgen-select
patchgen fit my_images --out my_model
patchgen explain my_model my_images/site_c --out maps</pre>
<p>What decides a label there is not known, so there is no truth to compare the masks with. The classifier reads only
what is bright; the backbone's own mixing remains. Selection maps are not annotations, and not a diagnosis.</p>"""


def demo(out: str = "demo", backbone: str = "registry", seed: int = 1, smoke: bool = False, json: bool = False) -> None:
    """Train LP, LP+LN, PatchGen as published and patchgen-select, and score them where the shortcut breaks.

    Args:
        out: Folder for the runs and the page.
        backbone: Pretrained weights; those of the package registry by default.
        seed: Seed of splits, batches and initial weights.
        smoke: A quick try with a tiny random backbone: shows that everything works, and no result.
        json: Print the scores as JSON instead of tables.
    """
    from patchgen.data.oracle import suite_folder, suite_spec
    from patchgen.methods.presets import preset_settings
    from patchgen.report.page import scores
    from patchgen.train.lifecycle import train

    spec = suite_spec(DATA)
    print(f"{DATA}: {len(spec.domains)} domains, {spec.unseen!r} unseen; drawing the images", file=sys.stderr)
    suite_folder(DATA)
    base = settings(DATA, spec.unseen, backbone, seed, smoke)
    runs = {}
    for number, method in enumerate(METHODS, 1):
        print(f"run {number} of {len(METHODS)}: {method}", file=sys.stderr)
        preset = preset_settings("small", method)
        rates = {name: preset[name] for name in ("lr", "lr_module") if name in preset}
        runs[method] = train(replace(base, method=method, **rates), Path(out) / "runs")
    if json:
        print(to_json.dumps(scores(runs), indent=2))
    else:
        _print(scores(runs), smoke)
    print(_write_page(runs, Path(out) / "index.html", smoke).resolve())


def settings(data: str, unseen: str, backbone: str, seed: int, smoke: bool) -> Config:
    """Small enough for two cores; images stay as they are, so that the truth stays beside them."""
    if smoke:
        small: dict[str, Any] = {
            "backbone": "tiny",
            "steps": 5,
            "eval_every": 2,
            "val_images": 8,
            "batch_per_domain": 4,
        }
    else:
        small = {"backbone": backbone, "steps": 101, "eval_every": 20, "val_images": 60, "batch_per_domain": 8}
    return Config(data=data, unseen=unseen, seed=seed, image_size=84, augment=False, **small)


def _print(rows: list[dict[str, Any]], smoke: bool) -> None:
    from patchgen.common.text import markdown
    from patchgen.report.page import show

    for columns in (COLUMNS, LINES):
        lines = [row for row in rows if columns is COLUMNS or row["true_mask"] is not None]
        cells = [[show(row[key], "%" in text) for key, text in columns.items()] for row in lines]
        print(markdown(list(columns.values()), cells), end="\n\n")
    if smoke:
        print("smoke run: a random backbone and five steps; these numbers mean nothing\n")


def _write_page(runs: dict[str, RunFolder], path: Path, smoke: bool) -> Path:
    from patchgen.report import page

    rows = page.scores(runs)
    lead = (
        "Each image's class is the motif in a few patches. In the source domains the background gives the class away "
        "as well; in the unseen domain it does not. A classifier that read the background fails there."
    )
    if smoke:
        lead = "SMOKE RUN: a random backbone and five steps; the numbers mean nothing. " + lead
    masks = (
        page.table([row for row in rows if row["true_mask"] is not None], LINES)
        + '<p class="note">The trained classifiers with the true patches, and with as many random ones, in place of '
        "their own mask. Where a random mask changes nothing, the mask decides nothing. AUROC 0.5 is a mask that ranks "
        "patches at random.</p>"
    )
    sections = [
        ("Accuracy", page.bars(rows) + page.table(rows, COLUMNS, best="unseen")),
        ("Does the mask matter?", masks),
        ("While training", page.curves(runs)),
        (f"Images of the unseen domain: image, truth, mask of {MASKED}", _gallery(runs)),
        ("Next: your own images", NEXT),
    ]
    return page.write_page(path, page.page("PatchGen where the shortcut breaks", lead, sections))


def _gallery(runs: dict[str, RunFolder]) -> str:
    """Unseen images, evenly over the classes, with what each method says of them."""
    from patchgen.data.oracle import true_masks
    from patchgen.data.table import read_table
    from patchgen.draw.overlay import original
    from patchgen.predict.predictor import Prediction, load_run
    from patchgen.report.page import gallery, triptych

    config = runs[MASKED].config
    table = read_table(config.data)
    rows = table.rows_of(config.unseen)
    rows = rows[:: max(1, len(rows) // SHOWN)][:SHOWN]
    paths = [table.file(int(row)) for row in rows]
    truth = true_masks(table, load_run(runs[MASKED].path).model.grid)
    said = {m: [p for p in load_run(run.path).predict(paths) if isinstance(p, Prediction)] for m, run in runs.items()}
    figures = []
    for i, row in enumerate(rows.tolist()):
        true, found = table.classes[table.label[row]], {m: said[m][i] for m in runs}
        mask: np.ndarray | None = found[MASKED].mask
        grid = mask.shape if mask is not None else (1, 1)
        known = truth[row].reshape(grid) if truth is not None else None
        verdicts = ", ".join(
            f'<span class="{"right" if p.label == true else "wrong"}">{escape(m)}: {escape(p.label)}</span>'
            for m, p in found.items()
        )
        alt = f"image of class {true}, its predictive patches, and the learned mask"
        figures.append((triptych(original(paths[i]), known, mask), alt, f"<b>{escape(true)}</b> &middot; {verdicts}"))
    note = (
        "Yellow is 1, dark purple 0, on the same scale for truth and mask. The classifier reads only what is bright; "
        "the backbone's own mixing remains. 0.5 is where a patch is read as much as without a selection."
    )
    return gallery(figures) + f'<p class="note">{note}</p>'


def main(argv: list[str]) -> int:
    parse(demo, "demo", argv)
    return 0

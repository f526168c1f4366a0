"""patchgen demo: train and compare on images whose answer is known; a table, and a page with the maps."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchgen.common.text import json_text, markdown
from patchgen.config import Config

DATA = "oracle-shortcut"
METHODS = ("patchgen", "patchgen-cls", "lp-ln", "lp")


def demo(out: str = "demo", backbone: str = "registry", seed: int = 1, smoke: bool = False, json: bool = False) -> None:
    """Train PatchGen, PatchGen with the class token, LP+LN and LP, and score them where the shortcut breaks.

    Args:
        out: Folder for the runs and the page.
        backbone: Pretrained weights; those of the package registry by default.
        seed: Seed of splits, batches and initial weights.
        smoke: A quick test with a tiny random backbone: shows that everything works, but gives no results.
        json: Print the scores as JSON instead of tables.
    """
    from patchgen.data.oracle import suite_folder, suite_spec
    from patchgen.methods.presets import preset_settings
    from patchgen.pages.page import write_page
    from patchgen.report.demo import MASKS, SCORES, cells, render_page, scores
    from patchgen.train.lifecycle import train

    spec = suite_spec(DATA)
    print(f"{DATA}: {len(spec.domains)} domains, {spec.unseen!r} unseen; drawing the images", file=sys.stderr)
    suite_folder(DATA)
    size: dict[str, Any] = {"backbone": backbone, "steps": 101, "eval_every": 20, "val_images": 60,
                            "batch_per_domain": 8}  # fmt: skip
    if smoke:
        size = {"backbone": "tiny", "steps": 5, "eval_every": 2, "val_images": 8, "batch_per_domain": 4}
    # small enough for two cores; without augmentation the true masks remain valid
    base = Config(data=DATA, unseen=spec.unseen, seed=seed, image_size=84, augment=False, **size)
    runs = {}
    for number, method in enumerate(METHODS, 1):
        print(f"run {number} of {len(METHODS)}: {method}", file=sys.stderr)
        preset = preset_settings("small", method)
        rates = {name: preset[name] for name in ("lr", "lr_module") if name in preset}
        runs[method] = train(replace(base, method=method, **rates), Path(out) / "runs")
    if json:
        print(json_text(scores(runs)))
    else:
        rows = scores(runs)
        print(markdown(list(SCORES.values()), cells(rows, SCORES)), end="\n\n")
        masked = [row for row in rows if row["true_mask"] is not None]
        print(markdown(list(MASKS.values()), cells(masked, MASKS)), end="\n\n")
        if smoke:
            print("smoke run: a random backbone and five steps; these numbers mean nothing\n")
    print(write_page(Path(out) / "index.html", render_page(runs, smoke)).resolve())


COMMAND = demo

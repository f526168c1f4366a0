"""What a person reads: one line an evaluation while a run goes on, and ``summary.md`` in its folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from patchgen.config import Config
from patchgen.tasks.mdg import Fold
from patchgen.train.records import RunFolder


def summarize(run: RunFolder, config: Config, fold: Fold) -> str:
    lines = [
        f"# {config.method} with {fold.unseen} unseen",
        "",
        f"- data: {len(fold.table)} images, {len(fold.table.domains)} domains, {len(fold.table.classes)} classes"
        + (f" ({fold.table.benchmark})" if fold.table.benchmark else ""),
        f"- trained on: {', '.join(fold.validation)}; split {config.split}, seed {config.seed}",
        f"- backbone {config.backbone}, {config.image_size} px, {config.steps} steps, "
        f"{config.batch_per_domain} images a domain, lr {config.lr:g}",
        f"- checkpoint chosen by: {config.select}" + (" (LOOKS AT THE UNSEEN DOMAIN)" * (config.select == "oracle")),
        "",
        "| checkpoint | step | accuracy, 80 % part | accuracy, whole | F1, whole | images | mask mean | spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for record in run.records("test"):
        mask = record.get("mask", {})
        step = record.get("step", f"{record.get('start_step')}-{record.get('end_step')}")
        health = " | ".join(f"{mask[k]:.3f}" if k in mask else "" for k in ("mean", "spread"))
        lines.append(
            f"| {record['checkpoint']} | {step} | {record['in']['accuracy']:.4f} | {record['all']['accuracy']:.4f} "
            f"| {record['all']['f1']:.4f} | {record['all']['images']} | {health} |"
        )
        if "covered" in record:
            names = ", ".join(record["covered"]["without"])
            score = f"{record['covered']['accuracy']:.4f}"
            notes.append(f"\nWithout {names}, which no source has, {record['checkpoint']}: {score}")
    return "\n".join(lines + notes) + "\n"


def progress_line(record: dict[str, Any]) -> str:
    """One evaluation in one line."""
    validation = record["validation"].values()
    text = f"step {record['step']}: " + " ".join(f"{k} {v:.3g}" for k, v in record["train"].items())
    text += f" | validation accuracy {np.mean([v['accuracy'] for v in validation]):.3f}"
    text += f" loss {np.mean([v['loss'] for v in validation]):.3f}"
    if "mean" in record.get("mask", {}):
        text += f" | mask {record['mask']['mean']:.2f} spread {record['mask']['spread']:.3f}"
    return text

"""``summary.md``: what a person reads first in a run folder."""

from __future__ import annotations

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

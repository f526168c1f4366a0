"""Human-readable output of a run: one line per evaluation during training, and ``summary.md`` in its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import backbone_of, best

if TYPE_CHECKING:
    from patchgen.tasks.fold import Fold

SCORES = {
    "balanced_accuracy": "balanced accuracy",
    "f1": "F1, whole",
    "auroc": "AUROC",
    "known": "known classes",
    "unknown": "new classes",
}  # in addition to accuracy, if recorded


def summarize(run: RunFolder, config: Config, fold: Fold) -> str:
    """The text of ``summary.md``."""
    tests = run.records("test")
    scores = {name: head for name, head in SCORES.items() if tests and name in tests[0]["all"]}
    head = ["checkpoint", "step", "accuracy, 80 % part", "accuracy, whole", *scores.values(), "images", "mask mean"]
    lines = [
        f"# {config.method} " + (f"with {fold.unseen} unseen" if fold.test else "on all domains"),
        "",
        f"- data: {len(fold.table)} images, {len(fold.table.domains)} domains, {len(fold.table.classes)} classes"
        + (f" ({fold.table.benchmark})" if fold.table.benchmark else "")
        + _unlabelled(fold),
        f"- trained on: {', '.join(fold.validation)}; split {config.split}, seed {config.seed}",
        f"- backbone {backbone_of(run)}, {config.image_size} px, {config.steps} steps, "
        f"{config.batch_per_domain} images per domain, lr {config.lr:g}",
        *_stopped(run, config),
        f"- checkpoint chosen by: {config.select}" + (" (LOOKS AT THE UNSEEN DOMAIN)" * (config.select == "oracle")),
        *([f"- F1: {_f1_of(fold)}"] if "f1" in scores else []),
        *(f"- {note}" for note in fold.notes),
        "",
    ]
    if not fold.test:
        return "\n".join([*lines, *_validated(run, config, fold)]) + "\n"
    lines += [
        f"| {' | '.join(head)} | spread |",
        "|" + "---|" * (len(head) + 1),
    ]
    notes = []
    for record in tests:
        mask = record.get("mask", {})
        step = record.get("step", f"{record.get('start_step')}-{record.get('end_step')}")
        numbers = [record["in"]["accuracy"], *(record["all"][name] for name in ("accuracy", *scores))]
        cells = [
            record["checkpoint"],
            step,
            *("-" if number is None else f"{number:.4f}" for number in numbers),
            record["all"]["images"],
        ]
        health = " | ".join(f"{mask[k]:.3f}" if k in mask else "" for k in ("mean", "spread"))
        lines.append(f"| {' | '.join(map(str, cells))} | {health} |")
        if "covered" in record:
            names = ", ".join(record["covered"]["without"])
            score = f"{record['covered']['accuracy']:.4f}"
            notes.append(f"\nWithout {names}, which no source has, {record['checkpoint']}: {score}")
        if "by_name" in record:
            notes.append(f"\n{record['checkpoint']}, by name: {_by_name(record)}")
        if "patients" in record:
            notes.append(f"\n{record['checkpoint']}, by patient: {_by_patient(record['patients'])}")
    return "\n".join(lines + notes) + "\n"


def _stopped(run: RunFolder, config: Config) -> list[str]:
    """The line for a run that --patience ended before its last step."""
    if config.patience is None:
        return []
    last = run.records("evaluation")[-1]["step"]
    return [f"- stopped early after step {last}: --patience {config.patience}"] * (last < config.steps - 1)


def _validated(run: RunFolder, config: Config, fold: Fold) -> list[str]:
    """The result of a run without an unseen domain: its accuracy at the sites it was trained on."""
    chosen = best(run.records("evaluation"), config.select, fold.metric)
    rows = [f"| {name} | {found['accuracy']:.4f} | {found['images']} |" for name, found in chosen["validation"].items()]
    return [
        f"No domain was left out. Held-out parts of the domains it was trained on, at step {chosen['step']}:",
        "",
        "| domain | accuracy | images |",
        "|---|---|---|",
        *rows,
        "",
        "Do not expect this accuracy at a new domain: `patchgen fit` leaves each out in turn to estimate that.",
    ]


def _by_patient(found: dict[str, Any]) -> str:
    """Every patient counts once; a vote needs a patient with one true label."""
    text = f"mean accuracy {found['accuracy']:.4f} over {found['patients']} patients, worst {found['worst']:.4f}"
    if "one_label" in found:
        vote = found["one_label"]
        text += f"; of {vote['patients']} patients with one label, {vote['majority']:.4f} are right by the majority of "
        text += f"their images and {vote['mean_probability']:.4f} by the mean probability"
    return text


def _by_name(record: dict[str, Any]) -> str:
    """What the joint match may hide: it can assign a known class's output to an unknown class."""
    named, taken = record["by_name"], record["all"]["taken_for_known"]
    shares = ", ".join(f"{group} {value:.4f}" for group, value in named.items())
    return f"{shares} (known classes only by their own output, new ones only by new outputs); {taken:.1%} of the " + (
        "unknown classes' images were given a known class"
    )


def _unlabelled(fold: Fold) -> str:
    count = int((fold.table.label < 0).sum())
    return f"; {count} of them have no label and are neither trained on nor scored" if count else ""


def _f1_of(fold: Fold) -> str:
    """Which F1 it is."""
    if fold.positive is None:
        return "mean over the classes that occur"
    return f"of class {fold.table.classes[fold.positive]!r}, the benchmark's positive one"


def progress_line(record: dict[str, Any]) -> str:
    """One evaluation in plain words; the terms of the objective are in the records."""
    validation, mask = record["validation"].values(), record.get("mask", {})
    words = [f"loss {record['train']['main']:.3f}"] if "main" in record["train"] else []
    words.append(f"validation accuracy {np.mean([domain['accuracy'] for domain in validation]):.3f}")
    if mask:
        words.append(f"mask mean {mask['mean']:.2f}, spread {mask['spread']:.3f}")  # all within 80 columns
    return f"step {record['step']}: {', '.join(words)}"

"""Human-readable output of a run: one line per evaluation during training, and ``summary.md`` in its folder."""

from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.common.text import markdown
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


def summarize(run: RunFolder, config: Config, fold: "Fold") -> str:
    """The text of ``summary.md``."""
    table, evaluations, tests = fold.table, run.records("evaluation"), run.records("test")
    lines = [
        f"# {config.method} " + (f"with {fold.unseen} unseen" if fold.test else "on all domains"),
        "",
        f"- data: {len(table)} images, {len(table.domains)} domains, {len(table.classes)} classes"
        + (f" ({table.benchmark})" if table.benchmark else ""),
        f"- trained on: {', '.join(fold.validation)}; split {config.split}, seed {config.seed}",
        f"- backbone {backbone_of(run)}, {config.image_size} px, {config.steps} steps, "
        f"{config.batch_per_domain} images per domain, lr {config.lr:g}",
    ]
    if without_label := int((table.label < 0).sum()):
        lines[2] += f"; {without_label} of them have no label and are neither trained on nor scored"
    if config.patience is not None and evaluations[-1]["step"] < config.steps - 1:
        lines.append(f"- stopped early after step {evaluations[-1]['step']}: --patience {config.patience}")
    lines.append(
        f"- checkpoint chosen by: {config.select}" + " (LOOKS AT THE UNSEEN DOMAIN)" * (config.select == "oracle")
    )
    if tests and "f1" in tests[0]["all"]:
        positive = fold.positive
        lines.append("- F1: " + ("mean over the classes that occur" if positive is None else
                                 f"of class {table.classes[positive]!r}, the benchmark's positive one"))  # fmt: skip
    lines += [*(f"- {note}" for note in fold.notes), ""]
    if fold.test:
        lines += [_table(tests), *_notes(tests)]
    else:
        lines += _validated(best(evaluations, config.select, fold.metric))
    return "\n".join(lines) + "\n"


def _table(tests: list[dict[str, Any]]) -> str:
    """The test records, one a line."""
    scores = {name: title for name, title in SCORES.items() if tests and name in tests[0]["all"]}
    rows = []
    for record in tests:
        step = record.get("step", f"{record.get('start_step')}-{record.get('end_step')}")
        numbers = [record["in"]["accuracy"], *(record["all"][name] for name in ("accuracy", *scores))]
        cells = ["-" if number is None else f"{number:.4f}" for number in numbers]
        mask = [f"{record['mask'][k]:.3f}" if k in record.get("mask", {}) else "" for k in ("mean", "spread")]
        rows.append([record["checkpoint"], str(step), *cells, str(record["all"]["images"]), *mask])
    head = ["checkpoint", "step", "accuracy, 80 % part", "accuracy, whole", *scores.values()]
    return markdown([*head, "images", "mask mean", "spread"], rows)


def _notes(tests: list[dict[str, Any]]) -> list[str]:
    """What the table has no column for."""
    notes = []
    for record in tests:
        name = record["checkpoint"]
        if "covered" in record:
            covered = record["covered"]
            notes.append(
                f"\nWithout {', '.join(covered['without'])}, which no source has, {name}: {covered['accuracy']:.4f}"
            )
        if "by_name" in record:  # a joint match can assign a known class's output to an unknown class
            shares = ", ".join(f"{group} {value:.4f}" for group, value in record["by_name"].items())
            notes.append(
                f"\n{name}, by name: {shares} (known classes only by their own output, new ones only by new outputs); "
                f"{record['all']['taken_for_known']:.1%} of the unknown classes' images were given a known class"
            )
        if "patients" in record:
            patients, vote = record["patients"], record["patients"].get("one_label")
            notes.append(
                f"\n{name}, by patient: mean accuracy {patients['accuracy']:.4f} over {patients['patients']} patients, "
                f"worst {patients['worst']:.4f}"
            )
            if vote:
                notes[-1] += (
                    f"; of {vote['patients']} patients with one label, {vote['majority']:.4f} are right by the "
                    f"majority of their images and {vote['mean_probability']:.4f} by the mean probability"
                )
    return notes


def _validated(record: dict[str, Any]) -> list[str]:
    """The result of a run without an unseen domain: its accuracy at the sites it was trained on."""
    rows = [[name, f"{scores['accuracy']:.4f}", str(scores["images"])] for name, scores in record["validation"].items()]
    return [
        f"No domain was left out. Held-out parts of the domains it was trained on, at step {record['step']}:",
        "",
        markdown(["domain", "accuracy", "images"], rows),
        "",
        "Do not expect this accuracy at a new domain: `patchgen fit` leaves each out in turn to estimate that.",
    ]


def progress_line(record: dict[str, Any]) -> str:
    """One evaluation in plain words, within 80 columns; the terms of the objective are in the records."""
    mask = record.get("mask", {})
    words = [f"loss {record['train']['main']:.3f}"] if "main" in record["train"] else []
    words.append(f"validation accuracy {np.mean([part['accuracy'] for part in record['validation'].values()]):.3f}")
    if mask:
        words.append(f"mask mean {mask['mean']:.2f}, spread {mask['spread']:.3f}")
    return f"step {record['step']}: {', '.join(words)}"

"""The end of a run: score the reported checkpoints once on the unseen domain, and write what a person reads.

Everything here depends only on the state after the last step, so a run killed here simply repeats it. The mask of a
selection inside the backbone is calibrated first (`find_level`), on held-out source images.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from patchgen.common.progress import Progress
from patchgen.common.text import markdown
from patchgen.config import Config
from patchgen.methods.build import load_trained
from patchgen.model.classifier import Output
from patchgen.model.selector import Selector, log_of, relative
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import backbone_of, best
from patchgen.runs.tensors import Predictions, load_tensors, save_predictions
from patchgen.tasks.mdg import at_most
from patchgen.tasks.metrics import probability_scores
from patchgen.train.evaluate import UNCALIBRATED, mask_record, patient_scores

if TYPE_CHECKING:
    from patchgen.tasks.mdg import Fold
    from patchgen.train.fold import FoldTrainer

UNTRAINED = "untrained"  # the checkpoint of the start, and the prefix of its figures in the test records
LEVEL_IMAGES, LEVEL_BATCH = 240, 60  # of source validation, for the level
CONTROLS = 500  # maximum number of images of a part
LOWER = (0.0, -0.5, -1.0, -2.0, -3.0)  # thresholds of log r to try, in this order
FLAT = 1e-2  # below this standard deviation of log r there is no selection: every patch is read
EVERYTHING = (1.0, 10.0)  # the level at which all patches are displayed as selected
STRONG = 2.0  # the logit of 0.88
# scores of the summary in addition to accuracy, if recorded
SCORES = {"balanced_accuracy": "balanced accuracy", "f1": "F1, whole", "auroc": "AUROC", "known": "known classes",
          "unknown": "new classes"}  # fmt: skip

Classify = Callable[[np.ndarray, Tensor | None], Output]  # rows, and a mask that replaces the model's own


def close_run(trainer: "FoldTrainer") -> None:
    run, fabric = trainer.run, trainer.fabric
    tensors, facts = load_tensors(run.checkpoint("selected"))
    fabric.barrier()  # no rank continues before all have read it
    control = _untrained_mask(trainer)
    reported = [_report(trainer, "selected", tensors, {"step": facts["step"], "rule": facts["rule"]})]
    if trainer.swad:
        result = trainer.swad.result()
        facts = {k: v for k, v in vars(result).items() if k != "average"}
        reported.append(_report(trainer, "swad", result.average, facts))
    if fabric.is_global_zero:
        for record in reported if trainer.fold.test else ():
            if "mask" in record:
                record["mask"] |= control
            run.append(record)
        run.finish(summarize(run, trainer.config, trainer.fold))
    fabric.barrier()


def _untrained_mask(trainer: "FoldTrainer") -> dict[str, float]:
    """The mask figures before any step, on some images: what training has added; empty without a mask to compare."""
    start = trainer.run.checkpoint(UNTRAINED)
    if not (start.exists() and trainer.fold.test and trainer.model.has_mask and trainer.method.mask == "learned"):
        return {}
    _load(trainer, load_tensors(start)[0])
    trainer.fabric.barrier()
    some = {part: at_most(rows, CONTROLS, [trainer.config.seed, 22]) for part, rows in trainer.fold.test.items()}
    parts = {part: trainer.evaluate(rows) for part, rows in some.items() if len(rows)}
    return {f"{UNTRAINED}_{name}": value for name, value in mask_record(parts).get("mask", {}).items()}


def _load(trainer: "FoldTrainer", tensors: dict[str, Tensor]) -> None:
    """Load tensors into the model; a mask with a level is calibrated, in `tensors` too."""
    load_trained(trainer.model, tensors)
    selector = trainer.model.select
    if isinstance(selector, Selector):
        selector.level.zero_()  # a run killed after this point has calibrated it already
        rows = np.concatenate(list(trainer.fold.validation.values()))
        trainer.model.drop.eval()
        level = find_level(trainer.evaluate.outputs, rows, trainer.fold.truth, torch.as_tensor(selector.gain).item())
        tensors["select.level"] = torch.tensor(level)
        load_trained(trainer.model, tensors)


def _report(trainer: "FoldTrainer", name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> dict[str, Any]:
    """Calibrate a checkpoint's mask if it has a level, save it, and score it."""
    _load(trainer, tensors)
    if (isinstance(trainer.model.select, Selector) or name == "swad") and trainer.fabric.is_global_zero:
        trainer.save(name, tensors, facts)
    return _score(trainer, name, facts) if trainer.fold.test else {}


def _score(trainer: "FoldTrainer", name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The record of the loaded checkpoint on the unseen domain; its predictions are saved with the run."""
    fold, evaluate = trainer.fold, trainer.evaluate
    unseen = np.concatenate(list(fold.test.values()))
    with Progress(f"scoring {fold.unseen} ({name})", len(unseen), quiet=trainer.quiet) as bar:
        whole = evaluate(unseen, bar.advance)
    label, probabilities = whole.label.astype(np.int64), whole.probabilities[:, : len(fold.classes)]
    if trainer.fabric.is_global_zero:
        order = np.argsort(unseen)
        predictions = Predictions(unseen[order], label[order], probabilities[order])
        save_predictions(trainer.run.path, name, predictions, fold.classes)
    record: dict[str, Any] = {"kind": "test", "checkpoint": name, "unseen": fold.unseen, **facts}
    record["metric"] = fold.metric  # the metric by which the checkpoint was selected
    if fold.positive is not None:
        record["positive"] = fold.table.classes[fold.positive]  # the class of `f1`; otherwise it is the macro F1
    parts = {part: whole.part(np.isin(unseen, rows)) for part, rows in fold.test.items() if len(rows)}
    record |= {part: {**fold.scores(result.confusion), **result.means()} for part, result in parts.items()}
    scores = fold.scores(whole.confusion)
    record["all"] = {name: value for name, value in scores.items() if not isinstance(value, dict)}
    record |= {name: value for name, value in scores.items() if isinstance(value, dict)}
    if evaluate.truth is not None and trainer.method.mask == "learned" and name == "selected":
        for mask in ("true", "random"):  # performance of the trained classifier with other masks
            accuracy = fold.scores(evaluate(unseen, mask=mask).confusion)["accuracy"]
            record[f"{mask}_mask"] = {"accuracy": accuracy}
    if trainer.config.task == "mdg":  # outputs are classes, without matching
        if fold.table.group:
            record["patients"] = patient_scores([fold.table.group[row] for row in unseen], label, probabilities)
        for part, result in (*parts.items(), ("all", whole)):
            record[part] |= probability_scores(result.label, result.probabilities)
    record |= mask_record(parts)
    if before := whole.mean(*(f"uncalibrated_{name}" for name in UNCALIBRATED)):
        record["mask_before_level"] = {name.removeprefix("uncalibrated_"): value for name, value in before.items()}
    return record


@torch.inference_mode()
def find_level(classify: Classify, rows: np.ndarray, label: np.ndarray, gain: float) -> tuple[float, float]:
    """Scale and shift of the displayed mask sigmoid(scale * log r + shift); `gain` is the mask's exponent in r.

    The classifier depends on r, so a mask of 0.5 has no meaning by itself. Here it is r = 1; if removing all other
    patches costs more than one standard error of the accuracy, a smaller r at which the selected patches suffice. The
    scale maps an average selected patch to 0.88. Only what is displayed changes.
    """
    if len(rows) > LEVEL_IMAGES:
        rows = rows[np.linspace(0, len(rows) - 1, LEVEL_IMAGES).astype(int)]
    parts = [rows[i : i + LEVEL_BATCH] for i in range(0, len(rows), LEVEL_BATCH)]
    outputs = [classify(part, None) for part in parts]
    masks = [out.own_mask for out in outputs if out.own_mask is not None]
    log_r = [relative(gain * log_of(mask)) for mask in masks]  # (B, P) each
    weight = torch.cat(log_r)
    if not weight.std() > FLAT:
        return EVERYTHING
    truth = torch.from_numpy(label[rows])

    def accuracy(logits: list[Tensor]) -> float:
        return float((torch.cat(logits).argmax(1).cpu() == truth).double().mean())

    whole = accuracy([out.logits for out in outputs])
    error = math.sqrt(max(whole * (1 - whole), 1 / len(rows)) / len(rows))
    for threshold in LOWER:
        above = weight >= threshold
        if above.all():
            break
        selected = [torch.where(read >= threshold, mask, 0) for read, mask in zip(log_r, masks, strict=True)]
        if accuracy([classify(part, mask).logits for part, mask in zip(parts, selected, strict=True)]) >= whole - error:
            scale = STRONG / float(weight[above].mean() - threshold)
            return scale, -scale * threshold
    return EVERYTHING


# What a person reads: lines during training, and summary.md in the run folder


def progress_line(record: dict[str, Any]) -> str:
    """One evaluation in plain words, within 80 columns; the terms of the objective are in the records."""
    mask = record.get("mask", {})
    words = [f"loss {record['train']['main']:.3f}"] if "main" in record["train"] else []
    words.append(f"validation accuracy {np.mean([part['accuracy'] for part in record['validation'].values()]):.3f}")
    if mask:
        words.append(f"mask mean {mask['mean']:.2f}, spread {mask['spread']:.3f}")
    return f"step {record['step']}: {', '.join(words)}"


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
        return "\n".join([*lines, _table(tests), *_notes(tests)]) + "\n"
    last = best(evaluations, config.select, fold.metric)
    rows = [[name, f"{scores['accuracy']:.4f}", str(scores["images"])] for name, scores in last["validation"].items()]
    lines.append(f"No domain was left out. Held-out parts of the domains it was trained on, at step {last['step']}:")
    end = "Do not expect this accuracy at a new domain: `patchgen fit` leaves each out in turn to estimate that."
    return "\n".join([*lines, "", markdown(["domain", "accuracy", "images"], rows), "", end]) + "\n"


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
        if covered := record.get("covered"):
            without = ", ".join(covered["without"])
            notes.append(f"\nWithout {without}, which no source has, {name}: {covered['accuracy']:.4f}")
        if "by_name" in record:  # a joint match can assign a known class's output to an unknown class
            shares = ", ".join(f"{group} {value:.4f}" for group, value in record["by_name"].items())
            notes.append(
                f"\n{name}, by name: {shares} (known classes only by their own output, new ones only by new outputs); "
                f"{record['all']['taken_for_known']:.1%} of the unknown classes' images were given a known class"
            )
        if patients := record.get("patients"):
            text = f"mean accuracy {patients['accuracy']:.4f} over {patients['patients']} patients"
            notes.append(f"\n{name}, by patient: {text}, worst {patients['worst']:.4f}")
            if vote := patients.get("one_label"):
                notes[-1] += (
                    f"; of {vote['patients']} patients with one label, {vote['majority']:.4f} are right by the "
                    f"majority of their images and {vote['mean_probability']:.4f} by the mean probability"
                )
    return notes

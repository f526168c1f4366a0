"""The end of a run: score the reported checkpoints once on the unseen domain, and mark the run as complete.

Everything here depends only on the state after the last step, so a run killed here simply repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from patchgen.common.progress import Progress
from patchgen.methods.build import load_trained
from patchgen.model.selector import Selector
from patchgen.runs.tensors import load_tensors, save_predictions
from patchgen.train.evaluate import mask_record
from patchgen.train.level import find_level
from patchgen.train.summary import summarize
from patchgen.train.tallies import MaskTally, PatientTally, ProbabilityTally, Tally

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer

UNTRAINED = "untrained"  # the checkpoint of the start, and the prefix of its figures in the test records


def close_run(trainer: FoldTrainer) -> None:
    """Score the reported checkpoints on the unseen domain (if one was left out), and finish the folder."""
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


def _untrained_mask(trainer: FoldTrainer) -> dict[str, float]:
    """The mask figures of the start, before any step, on the images on which the trained mask is scored.

    So a record says how much of an AUROC or IoU training has added. Empty if there is no mask to compare.
    """
    start = trainer.run.checkpoint(UNTRAINED)
    if not (start.exists() and trainer.fold.test and trainer.model.has_mask and trainer.method.mask == "learned"):
        return {}
    _load(trainer, load_tensors(start)[0])
    trainer.fabric.barrier()
    parts = {part: trainer.evaluate(rows) for part, rows in trainer.fold.test.items() if len(rows)}
    return {f"{UNTRAINED}_{name}": value for name, value in mask_record(parts).get("mask", {}).items()}


def _load(trainer: FoldTrainer, tensors: dict[str, Tensor]) -> None:
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


def _report(trainer: FoldTrainer, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> dict[str, Any]:
    """Calibrate a checkpoint's mask if it has a level, save it, and score it."""
    _load(trainer, tensors)
    if (isinstance(trainer.model.select, Selector) or name == "swad") and trainer.fabric.is_global_zero:
        trainer.save(name, tensors, facts)
    return _score(trainer, name, facts) if trainer.fold.test else {}


def _score(trainer: FoldTrainer, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The record of the loaded checkpoint on the unseen domain; its predictions are saved with the run."""
    fold, evaluate = trainer.fold, trainer.evaluate
    unseen = np.concatenate(list(fold.test.values()))
    with Progress(f"scoring {fold.unseen} ({name})", len(unseen), quiet=trainer.quiet) as bar:
        probabilities = ProbabilityTally(unseen, len(fold.classes))
        patients, masks = _patients(trainer, unseen), _masks(trainer)
        tallies: list[Tally] = [probabilities, *([patients] if patients else [])]
        parts = {
            part: evaluate(rows, bar.advance, tallies=tallies, own_masks=masks)
            for part, rows in fold.test.items()
            if len(rows)
        }
    record: dict[str, Any] = {"kind": "test", "checkpoint": name, "unseen": fold.unseen, **facts}
    record["metric"] = fold.metric  # the metric by which the checkpoint was selected
    if fold.positive is not None:
        record["positive"] = fold.table.classes[fold.positive]  # the class of `f1`; otherwise it is the macro F1
    whole = fold.scores(np.sum([part.confusion for part in parts.values()], axis=0))
    record |= {part: {**fold.scores(result.confusion), **result.means()} for part, result in parts.items()}
    record["all"] = {name: value for name, value in whole.items() if not isinstance(value, dict)}
    record |= {name: value for name, value in whole.items() if isinstance(value, dict)}
    if evaluate.truth is not None and trainer.method.mask == "learned" and name == "selected":
        for mask in ("true", "random"):  # performance of the trained classifier with other masks
            accuracy = fold.scores(evaluate(unseen, mask=mask).confusion)["accuracy"]
            record[f"{mask}_mask"] = {"accuracy": accuracy}
    if patients:
        patients.gather(trainer.fabric)
        record["patients"] = patients.record()
    probabilities.gather(trainer.fabric)
    if trainer.fabric.is_global_zero:
        save_predictions(trainer.run.path, name, probabilities.predictions(), fold.classes)
    if trainer.config.task == "mdg":  # outputs are classes, without matching
        for part, rows in (*fold.test.items(), ("all", unseen)):
            record[part] |= probabilities.record(rows)
    record |= mask_record(parts)
    if masks:
        masks.gather(trainer.fabric)
        record["mask_before_level"] = masks.record()
    return record


def _masks(trainer: FoldTrainer) -> MaskTally | None:
    """For masks with a calibrated level, if the predictive patches are known; else None."""
    truth = trainer.evaluate.truth
    return MaskTally(truth) if isinstance(trainer.model.select, Selector) and truth is not None else None


def _patients(trainer: FoldTrainer, rows: np.ndarray) -> PatientTally | None:
    """If the data has patients, and outputs are classes, without matching; else None."""
    fold = trainer.fold
    group = fold.table.group
    return PatientTally(group, rows, fold.size) if group and trainer.config.task == "mdg" else None

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
from patchgen.runs.tensors import load_tensors
from patchgen.train.evaluate import mask_record
from patchgen.train.level import find_level
from patchgen.train.own_masks import OwnMasks
from patchgen.train.patients import PatientTally
from patchgen.train.ranks import ProbabilityTally
from patchgen.train.summary import summarize

if TYPE_CHECKING:
    from patchgen.train.fold import FoldTrainer


def close_run(trainer: FoldTrainer) -> None:
    """Score the reported checkpoints on the unseen domain (if one was left out), and finish the folder."""
    run, fabric = trainer.run, trainer.fabric
    tensors, facts = load_tensors(run.checkpoint("selected"))
    fabric.barrier()  # no rank continues before all have read it
    reported = [_report(trainer, "selected", tensors, {"step": facts["step"], "rule": facts["rule"]})]
    if trainer.swad:
        found = trainer.swad.result()
        facts = {k: v for k, v in vars(found).items() if k != "average"}
        reported.append(_report(trainer, "swad", found.average, facts))
    if fabric.is_global_zero:
        for record in reported if trainer.fold.test else ():
            run.append(record)
        run.finish(summarize(run, trainer.config, trainer.fold))
    fabric.barrier()


def _report(trainer: FoldTrainer, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> dict[str, Any]:
    """Calibrate a checkpoint's mask if it has a level, save it, and score it."""
    load_trained(trainer.model, tensors)
    selector = trainer.model.select
    if isinstance(selector, Selector):
        selector.level.zero_()  # a run killed after this point has calibrated it already
        rows = np.concatenate(list(trainer.fold.validation.values()))
        trainer.model.drop.eval()
        level = find_level(trainer.evaluate.outputs, rows, trainer.fold.truth, torch.as_tensor(selector.gain).item())
        tensors["select.level"] = torch.tensor(level)
    if (isinstance(selector, Selector) or name == "swad") and trainer.fabric.is_global_zero:
        trainer.save(name, tensors, facts)
    return _score(trainer, name, tensors, facts)


def _score(trainer: FoldTrainer, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> dict[str, Any]:
    """The record of one checkpoint."""
    fold, evaluate = trainer.fold, trainer.evaluate
    if not fold.test:
        return {}
    load_trained(trainer.model, tensors)
    total = sum(len(rows) for rows in fold.test.values())
    with Progress(f"scoring {fold.unseen} ({name})", total, quiet=trainer.quiet) as bar:
        patients, ranks = _patients(trainer), _ranks(trainer)
        tallies, own = [tally for tally in (patients, ranks) if tally], _own_masks(trainer)
        parts = {
            part: evaluate(rows, bar.advance, tallies=tallies, own_masks=own)
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
        rows = np.concatenate(list(fold.test.values()))
        for mask in ("true", "random"):  # performance of the trained classifier with other masks
            found = fold.scores(evaluate(rows, mask=mask).confusion)
            record[f"{mask}_mask"] = {"accuracy": found["accuracy"]}
    if patients:
        patients.gather(trainer.fabric)
        record["patients"] = patients.record()
    if ranks:
        ranks.gather(trainer.fabric)
        for part, rows in (*fold.test.items(), ("all", np.concatenate(list(fold.test.values())))):
            record[part] |= ranks.record(rows)
    record |= mask_record(parts)
    if own:
        own.gather(trainer.fabric)
        record["mask_before_level"] = own.record()
    return record


def _own_masks(trainer: FoldTrainer) -> OwnMasks | None:
    """For masks with a calibrated level, if the predictive patches are known; else None."""
    truth = trainer.evaluate.truth
    return OwnMasks(truth) if isinstance(trainer.model.select, Selector) and truth is not None else None


def _ranks(trainer: FoldTrainer) -> ProbabilityTally | None:
    """If outputs are classes, without matching; else None."""
    fold = trainer.fold
    rows = np.concatenate(list(fold.test.values()))
    return ProbabilityTally(rows, fold.size) if trainer.config.task == "mdg" else None


def _patients(trainer: FoldTrainer) -> PatientTally | None:
    """If the data has patients, and outputs are classes, without matching; else None."""
    fold = trainer.fold
    group, rows = fold.table.group, np.concatenate(list(fold.test.values()))
    return PatientTally(group, rows, fold.size) if group and trainer.config.task == "mdg" else None

"""The lifecycle of a run, for every task: created or opened, locked, resumed, saved, finished.

    run = train(Config(data="photos", unseen="site_c"), "runs")

The loop of its task (`train/fold.py`, `ccd/loop.py`) is a `Trainer`, with a resumable state.
"""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchgen.common.progress import is_first, logger
from patchgen.config import Config, Settings
from patchgen.data.images import digests
from patchgen.data.table import Table
from patchgen.methods.build import load_trained
from patchgen.model.classifier import trained_tensors
from patchgen.runs.folder import AUTO, RunFolder, other_weights, run_name, with_precision
from patchgen.runs.tensors import save_tensors, under
from patchgen.tasks import Fold, get_task, make_fold
from patchgen.train.track import make_tracker

LEFT_OUT = ".leave-one-out"  # the trainings without each source, inside the run; hidden from tables of runs
NAMED = 4  # images named in an error message; a file next to the records lists all
StepValues = list[tuple[int, Mapping[str, Tensor]]]  # step and named values, copied: reading them would synchronise


def train(
    config: Settings, out: str | Path, table: Table | None = None, *, quiet: bool = False, track: str | bool = False
) -> RunFolder:
    """Train and score one run in a folder below `out`; a finished run is returned unchanged, another resumed.

    `table` is the data, if already read; `track` also logs to `tensorboard` (or True), `wandb` or `mlflow`.
    """
    task = get_task(config.task)
    task.make_method(config)  # report a wrong name before reading the data
    data = task.read(config, table)
    fingerprint = data.fingerprint()
    if config.precision == AUTO:
        config = with_precision(config, out, fingerprint)
        if not quiet and is_first(line := f"precision: {config.precision}, by `auto`"):
            logger.info(line)
    name = run_name(config, fingerprint)
    new = not (Path(out) / name).exists()
    run = RunFolder.create(out, config, name, fingerprint)
    if _first_process():
        run.check_content(digests(data.table), data.table.paths)
    if run.done:
        return run
    tracker = make_tracker(track) if track else None
    if tracker:
        run.listeners.append(tracker)
    with _locked(run):
        if run.done:  # finished by another process since the check above
            return run
        run.renew_settings(config)
        data.write_rows(run.path)
        loop: Callable[..., None] = import_module(task.loop).work
        try:
            if isinstance(config, Config) and config.select == "leave-one-out":
                _train_without_each(loop, config, run, cast(Fold, data), quiet)
            loop(config, run, data, quiet)
        except ValueError:
            if new and _first_process():
                run.remove_refused()
            raise
        if tracker:
            tracker.close()
    return run


def _locked(run: RunFolder) -> AbstractContextManager[None]:
    return run.locked() if _first_process() else nullcontext()


def _first_process() -> bool:
    """In a job started by torchrun or Slurm, the first process holds the run's lock for all."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def _train_without_each(loop: Callable[..., None], config: Config, run: RunFolder, fold: Fold, quiet: bool) -> None:
    """`--select leave-one-out`: DomainBed's leave-one-domain-out cross-validation, over the source domains alone."""
    for source in fold.validation:
        inner = replace(config, unseen=source, select="oracle", swad=False, patience=None)
        whole = make_fold(inner, fold.table)
        part = replace(
            whole,
            train={d: rows for d, rows in whole.train.items() if d in fold.train},
            validation={d: rows for d, rows in whole.validation.items() if d in fold.validation},
        )
        place = RunFolder.create(run.path / LEFT_OUT, inner, run_name(inner, run.data), run.data)
        with _locked(place):
            if not place.done:
                part.write_rows(place.path)
                loop(inner, place, part, quiet)


def scores_without_each(run: RunFolder, step: int, metric: str) -> dict[str, float]:
    """Each source's score at an evaluation of the training without it."""
    runs = [RunFolder(path) for path in sorted((run.path / LEFT_OUT).iterdir())]
    return {
        left_out.config.unseen: record["oracle"][metric]
        for left_out in runs
        for record in left_out.records("evaluation")
        if record["step"] == step
    }


class Trainer:
    """Base of the training loops: a model, an optimiser, a run folder, and a resumable state."""

    config: Any
    model: nn.Module
    optimizer: Any
    about: dict[str, Any]  # metadata for each checkpoint; about["backbone"] names the weights
    micro_batch: int  # images that go through the network at once

    def __init__(self, run: RunFolder, fabric: Any, quiet: bool) -> None:
        self.run, self.fabric, self.quiet = run, fabric, quiet
        self.values: StepValues = []  # since the last record

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts in addition to those of the model and the optimiser; `restore` takes them back."""
        raise NotImplementedError

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Called before the first step of a new run."""

    def say(self, text: str) -> None:
        if not self.quiet:
            logger.info(text)

    def save(self, name: str, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
        save_tensors(self.run.checkpoint(name), tensors, {**self.about, **facts})

    def save_state(self) -> None:
        """Save everything that the rest of the run depends on, including the length of the records in bytes."""
        own, facts = self.own_state()
        tensors = {f"model.{k}": v for k, v in trained_tensors(self.model).items()}
        tensors |= {f"optimizer.{k}": v for k, v in optimizer_tensors(self.optimizer).items()}
        self.save("state", tensors | own, {**facts, **self.run.records_mark()})

    def resume(self) -> None:
        """Restore the last state, or begin; records written after that state are dropped and recomputed."""
        backbone, first = self.about["backbone"], self.fabric.is_global_zero
        if first:
            if other := other_weights(self.run, backbone):
                logger.warning(other)
            self.run.write_environment(backbone, micro_batch=self.micro_batch)
        state = self.run.state(backbone)
        tensors, facts = state or ({}, {"records": 0})
        if state:
            load_trained(self.model, under(tensors, "model."))
            restore_optimizer(self.optimizer, under(tensors, "optimizer."))
            self.restore(tensors, facts)
        else:
            self.begin()
        self.fabric.barrier()
        if first:
            self.run.rewind_records(facts["records"], facts.get("records_crc32"))

    def means(self, last: int, images: Callable[[int], list[str]], **place: int) -> dict[str, float]:
        """The means since the last record, over all devices; ValueError if one or a trained weight is not finite."""
        columns: dict[str, list[Tensor]] = {}
        for _, values in self.values:
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
        means: dict[str, float] = {}
        if columns:
            each = torch.stack([torch.as_tensor(sum(column) / len(column)) for column in columns.values()])
            means = dict(zip(columns, self.fabric.all_reduce(each).tolist(), strict=True))
        steps, self.values = self.values, []
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        finite = [tensor.isfinite().all() for tensor in trained_tensors(self.model).values()]
        if not bad and finite and not torch.stack(finite).all():
            bad = ["weights"]
        if not bad:
            return means
        first = min((step for step, values in steps for value in values.values() if not value.isfinite()), default=last)
        place["step"] = int(self.fabric.all_gather(torch.tensor(first, device=self.fabric.device)).min())
        files = images(place["step"])
        if self.fabric.is_global_zero:
            self.run.write_json("diverged.json", {**place, "values": bad, "images": files})
        raise ValueError(
            f"training diverged at {', '.join(f'{unit} {number}' for unit, number in place.items())}: {', '.join(bad)} "
            f"is not finite; lower --lr (now {self.config.lr:g}), or look at the images of that step: "
            f"{', '.join(files[:NAMED])}{', ...' * (len(files) > NAMED)} (all of them: diverged.json). The last saved "
            f"state is in {self.run.path}"
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser state as flat tensors: ``<parameter number>.<name>``."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": tensor for i, slots in state.items() for name, tensor in slots.items() if tensor is not None}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore the result of `optimizer_tensors`; the current learning rates stay."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

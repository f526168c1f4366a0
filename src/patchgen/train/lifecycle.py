"""The lifecycle of a run, for every task: created or opened, locked, resumed, saved, finished.

    from patchgen.config import Config
    from patchgen.train.lifecycle import train
    run = train(Config(data="photos", unseen="site_c"), "runs")

`train` reads the data, names the run and holds its lock; the training loop of its task (`train/fold.py`,
`ccd/loop.py`) does the work. A loop is a `Trainer`: this module saves and restores its state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from patchgen.common.progress import is_first, logger
from patchgen.config import Config, Settings
from patchgen.data.content import digests
from patchgen.data.table import Table
from patchgen.methods.build import load_trained
from patchgen.model.classifier import trained_tensors
from patchgen.runs.folder import RunFolder, other_weights, run_name
from patchgen.runs.precision import AUTO, with_precision
from patchgen.runs.tensors import save_tensors, under
from patchgen.tasks import Fold, get_task
from patchgen.train.leave_one_out import train_without_each
from patchgen.train.optim import optimizer_tensors, restore_optimizer
from patchgen.train.track import make_tracker


def train(
    config: Settings, out: str | Path, table: Table | None = None, *, quiet: bool = False, track: str | bool = False
) -> RunFolder:
    """Train and score one run; a finished run is returned unchanged, an interrupted one is resumed.

    Args:
        out: Parent of the run folder.
        table: The data, if it has already been read.
        track: Also log to `tensorboard` (or True), `wandb` or `mlflow` (`patchgen.train.track`).
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
                train_without_each(loop, _locked, config, run, cast(Fold, data), quiet)
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


class Trainer:
    """Base of the training loops: a model, an optimiser, a run folder, and a resumable state.

    Attributes:
        about: Metadata for each checkpoint; ``about["backbone"]`` names the weights.
        fabric: A `SingleDevice`, or Lightning's `Fabric` of several.
        writes: Whether this process writes files; only one of those that share a run does.
    """

    model: nn.Module
    optimizer: Any
    about: dict[str, Any]
    writes = True
    micro_batch: int  # images that go through the network at once

    def __init__(self, run: RunFolder, fabric: Any, quiet: bool) -> None:
        self.run, self.fabric, self.quiet = run, fabric, quiet

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts in addition to those of the model and the optimiser."""
        raise NotImplementedError

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore the result of `own_state`."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called before the first step of a new run."""

    def barrier(self) -> None:
        """Wait for the other processes of the run."""

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
        if self.writes:
            if other := other_weights(self.run, self.about["backbone"]):
                logger.warning(other)
            self.run.write_environment(self.about["backbone"], micro_batch=self.micro_batch)
        state = self.run.state(self.about["backbone"])
        seen: dict[str, Any] = {"records": 0}
        if state is None:
            self.begin()
        else:
            tensors, seen = state
            load_trained(self.model, under(tensors, "model."))
            restore_optimizer(self.optimizer, under(tensors, "optimizer."))
            self.restore(tensors, seen)
        self.barrier()
        if self.writes:
            self.run.rewind_records(seen["records"], seen.get("records_crc32"))

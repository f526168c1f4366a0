"""What the training loops of all tasks share: a resumable state, the named values of the steps, and divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.common.progress import logger
from patchgen.methods.build import load_trained
from patchgen.model.classifier import trained_tensors
from patchgen.runs.folder import RunFolder, other_weights
from patchgen.runs.tensors import save_tensors, under

NEVER = 2**62  # no step has this number
NAMED = 4  # images named in an error message; a file next to the records lists all


class StepValues:
    """Sums of named values on the device, without synchronisation until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, tuple[Tensor, int]] = {}
        self.first_bad = torch.full((), NEVER, device=device)  # the first step with a value that is not finite

    def add(self, values: Mapping[str, Tensor], step: int) -> None:
        for name, value in values.items():
            total, count = self.sums.get(name, (torch.zeros_like(value), 0))
            self.sums[name] = total + value.detach(), count + 1
        if values:  # a sum is finite only where all of its terms are
            finite = torch.stack([value.detach().float() for value in values.values()]).sum().isfinite()
            self.first_bad = torch.where(finite, self.first_bad, self.first_bad.clamp(max=step))

    def means(self, over_ranks: Callable[[Tensor], Tensor] = lambda values: values) -> dict[str, float]:
        """Averages since `clear`. Reading them synchronises the device."""
        if not self.sums:
            return {}
        values = over_ranks(torch.stack([total / count for total, count in self.sums.values()]))
        return dict(zip(self.sums, values.tolist(), strict=True))

    def clear(self) -> None:
        self.sums = {}


class Trainer:
    """Base of the training loops: a model, an optimiser, a run folder, and a resumable state."""

    config: Any
    model: nn.Module
    optimizer: Any
    about: dict[str, Any]  # metadata for each checkpoint; about["backbone"] names the weights
    micro_batch: int  # images that go through the network at once

    def __init__(self, run: RunFolder, fabric: Any, quiet: bool) -> None:
        self.run, self.fabric, self.quiet = run, fabric, quiet
        self.values = StepValues(fabric.device)

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts in addition to those of the model and the optimiser."""
        raise NotImplementedError

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore the result of `own_state`."""
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

    def require_finite(
        self, means: Mapping[str, float], last: int, images: Callable[[int], list[str]], **place: int
    ) -> None:
        """Raise ValueError if a mean or a trained weight is not finite; ``diverged.json`` lists the files of its step.

        If only the weights are not finite, this is the `last` step; `place` says in which stage and epoch it is.
        """
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        finite = [tensor.isfinite().all() for tensor in trained_tensors(self.model).values()]
        if not bad and finite and not torch.stack(finite).all():
            bad = ["weights"]
        if not bad:
            return
        place["step"] = min(last, int(self.fabric.all_gather(self.values.first_bad).min()))
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

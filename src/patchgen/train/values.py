"""The named values of the steps since the last evaluation, and the error message if one of them is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from patchgen.model.classifier import trained_tensors
from patchgen.runs.folder import RunFolder

NEVER = 2**62  # no step has this number
NAMED = 4  # images named in an error message; a file next to the records lists all


class StepValues:
    """Sums on the device, without synchronisation until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, tuple[Tensor, Tensor | int]] = {}
        self.first_bad = torch.full((), NEVER, device=device)  # the first step with a value that is not finite

    def add(self, values: Mapping[str, Tensor], step: int, weight: Tensor | None = None) -> None:
        """Add values of a step, or of a part of it with its share as the weight ()."""
        for name, value in values.items():
            total, count = self.sums.get(name, (torch.zeros_like(value), 0))
            value = value.detach()
            self.sums[name] = (total + value, count + 1) if weight is None else (total + weight * value, count + weight)
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


def not_finite(means: Mapping[str, float], model: nn.Module) -> list[str]:
    """The values that are not finite; "weights" if the last step affected only these."""
    bad = [name for name, value in means.items() if not math.isfinite(value)]
    finite = [tensor.isfinite().all() for tensor in trained_tensors(model).values()]
    return bad or (["weights"] if finite and not torch.stack(finite).all() else [])


def diverged(
    run: RunFolder, where: Mapping[str, int], bad: Sequence[str], images: Sequence[str], lr: float, write: bool = True
) -> ValueError:
    """The error for a run that cannot continue; with `write`, the images of its step are listed in ``diverged.json``.

    Args:
        where: the step, and the units that contain it: {"stage": 1, "epoch": 2, "step": 3}.
        images: files of that step.
    """
    if write:
        run.write_json("diverged.json", {**where, "values": list(bad), "images": list(images)})
    place = ", ".join(f"{kind} {number}" for kind, number in where.items())
    return ValueError(
        f"training diverged at {place}: {', '.join(bad)} is not finite; lower --lr (now {lr:g}), or look at the images "
        f"of that step: {', '.join(images[:NAMED])}{', ...' * (len(images) > NAMED)} (all of them: diverged.json). The "
        f"last saved state is in {run.path}"
    )

"""patchgen-select: the class token reads what an early mask selects, and contradicting images have their share.

    patchgen-select      `model/selector.py` trained by balanced cross-entropy
    patchgen-attend      the published module behind the backbone, whose attention reads the selection; a variant

What the published mask lacks and how these were chosen: docs/results/selection.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, no_grad

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.balance import Balance
from patchgen.methods.method import Rates
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Output
from patchgen.model.selector import Selector

if TYPE_CHECKING:
    from patchgen.train.step import Step


class PatchGenSelect(Balance):
    """The class token reads what a mask selects, as strongly as the context expert gives reason to.

    Where the context alone tells the label (contradiction q up to the share s), the selection has full strength. Where
    it misleads anyway (q from 1.5 s on), it has the fraction ``floor``: the classifier stays near LayerNorm tuning.
    """

    pool = "select"
    defaults: ClassVar[Mapping[str, float]] = {"floor": 0.25}
    small_rates = Rates(3e-3, module=1e-3)
    addable = False
    summary = "the class token reads what a mask inside the backbone selects; balanced cross-entropy"
    reference = "this project"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not 0 < self.hparams["floor"] <= 1:
            raise ValueError(f"hyper-parameter floor is a share above 0 and at most 1, not {self.hparams['floor']:g}")

    def update(self, step: Step) -> None:
        selector = step.model.select
        assert isinstance(selector, Selector)
        selector.strength.copy_(self.strength())
        super().update(step)

    def strength(self) -> Tensor:
        """How much the selection counts, from the floor to 1; the floor before the expert has seen an image."""
        share, floor = self.hparams["share"], self.hparams["floor"]
        if not share:  # no expert is asked
            return torch.ones(())
        reason = ((1.5 * share - self.contradiction) / (0.5 * share)).clamp(0, 1).nan_to_num(0)
        return floor + (1 - floor) * reason

    @no_grad()
    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().watch(out, batch) | {
            "mask_mean": out.selection().mean(),
            "strength": self.strength(),
        }


class SelectTrueMask(PatchGenSelect):
    mask = "true"
    compared = False
    summary = "patchgen-select with the true mask in place of the learned one (upper bound; oracle data only)"


class PatchGenAttend(Balance, PatchGenWithoutLosses):
    attend, start = "selected", "contrast"
    small_rates = Rates(3e-3, module=3e-4)
    addable = False
    compared = False
    summary = "the published module, but its attention reads the selection; balanced cross-entropy"
    reference = "this project"

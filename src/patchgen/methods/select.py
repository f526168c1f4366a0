"""patchgen-select: the class token reads what an early mask selects, trained with balanced cross-entropy.

    patchgen-select      `model/selector.py` with the loss of `methods/balance.py`
    patchgen-attend      a variant: the published module after the backbone, with attention to the selected patches

See docs/results/selection.md for what the published mask lacks and how these were chosen.
"""

from __future__ import annotations

from torch import Tensor, no_grad

from patchgen.data.loaders import Batch
from patchgen.methods.balance import Balance
from patchgen.methods.method import Rates
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Output


class PatchGenSelect(Balance):
    pool = "select"
    small_rates = Rates(3e-3, module=1e-3)
    addable = False
    summary = "the class token reads what a mask inside the backbone selects; balanced cross-entropy"
    reference = "this project"

    @no_grad()
    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        return super().watch(out, batch) | {"mask_mean": out.selection().mean()}


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

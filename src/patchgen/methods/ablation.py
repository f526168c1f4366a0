"""Rows 2.1 to 2.4 of the paper's ablation: other selectors in PatchGen's place, under the same budget.

The other rows need no class of their own: 1.1 is `lp-ln`, 1.2 `gmdg`, 3.1 `patchgen-no-losses`, and 3.2 to 3.5 are
`patchgen` with loss weights, where each row from 3.3 on adds one term:

    3.2  lambda_ms 1e-2, lambda_conf 0, lambda_sim 0      ten times L_ms
    3.3  lambda_ms 1e-3, lambda_conf 0, lambda_sim 0      L_ms
    3.4  lambda_ms 1e-3, lambda_conf 1, lambda_sim 0      + L_conf
    3.5  lambda_ms 1e-3, lambda_conf 1, lambda_sim 1e-3   + L_sim: PatchGen
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from patchgen.data.loaders import Batch
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import mask_suppression
from patchgen.model.variants import ChannelMask, PlainAttention, ScaledAttention, StaticMask, Variant


class OtherSelector(PatchGenWithoutLosses):
    """Cross-entropy on what another selector makes of the tokens."""

    compared = False  # rows of the ablation, not methods of the field
    selector: ClassVar[type[Variant]]

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        if model.select is not None:
            model.select = self.selector.of(model.select, self.config.refine)


class Static(OtherSelector):
    selector = StaticMask
    summary = "one learned mask over positions, shared by all images (ablation row 2.1)"


class Channel(OtherSelector):
    selector = ChannelMask
    summary = "one learned mask over channels, on the mean token (ablation row 2.2)"


class Attention(OtherSelector):
    selector = PlainAttention
    summary = "the module's attention and the mean over patches, no mask (ablation row 2.3)"


class AttentionSuppressed(OtherSelector):
    selector = ScaledAttention
    summary = "row 2.3 with L_ms on its outgoing scores, scaled to [0, 1] (ablation row 2.4)"

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        mask = out.selection()
        return super().losses(out, batch) | {"L_ms": self.config.lambda_ms * mask_suppression(mask, self.config.tau)}

"""Rows 2.1 to 2.4 of the paper's ablation: other selectors in PatchGen's place, under the same budget.

The other rows need no separate class: 1.1 is `lp-ln`, 1.2 `gmdg`, 3.1 `patchgen-no-losses`, and 3.2 to 3.5 are
`patchgen` with loss weights, where each row from 3.3 on adds one term:

    3.2  lambda_ms 1e-2, lambda_conf 0, lambda_sim 0      ten times L_ms
    3.3  lambda_ms 1e-3, lambda_conf 0, lambda_sim 0      L_ms
    3.4  lambda_ms 1e-3, lambda_conf 1, lambda_sim 0      + L_conf
    3.5  lambda_ms 1e-3, lambda_conf 1, lambda_sim 1e-3   + L_sim: PatchGen

`ablation-select` is `patchgen-select` with each of its choices as a hyper-parameter (configs/small/selection.yaml).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.balance import PatchGenSelect
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import class_similarity, mask_suppression, selected_confidence
from patchgen.model.patchgen import PatchGen
from patchgen.model.selector import Selector, log_of
from patchgen.model.variants import ChannelMask, PlainAttention, ScaledAttention, StaticMask, Variant

if TYPE_CHECKING:
    from patchgen.train.loop import Step


class OtherSelector(PatchGenWithoutLosses):
    """Cross-entropy on the output of another selector."""

    compared = False  # rows of the ablation, not methods of the field
    selector: ClassVar[type[Variant]]

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        if isinstance(model.select, PatchGen):
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


def _hard(log_mask: Tensor) -> Tensor:
    """log of the 0/1 mask, with the gradient of log m."""
    return log_mask + (log_of((log_mask.exp() >= 0.5).float()) - log_mask).detach()


class SelectChoices(PatchGenSelect):
    """patchgen-select with its design choices as hyper-parameters. The defaults are those of patchgen-select.

    block         the block after which the mask is computed; 0 means a third of the way up
    gain          exponent of the mask in the attention weights; with `learn_gain` 1, its initial value
    spread        standard deviation of the scores at the start
    everywhere    1: the selection also acts on attention between patches, not only on the class token
    contrast      0: scores start at random, as published, instead of with contrast
    ms, conf, sim weights of the published losses
    on_features   1: the context expert reads the classifier's features, instead of the mean early token
    anneal        share of the steps over which the effect of the mask grows from zero
    hard_from     share of the steps after which training uses 0/1 masks, with the gradient of the soft ones
    drop          probability of removing a patch with less than average weight in training
    """

    compared = False
    summary = "patchgen-select with each choice as a hyper-parameter (docs/results/selection.md)"
    defaults = {
        "block": 0, "gain": 2, "learn_gain": 0, "spread": 1, "everywhere": 0, "contrast": 1, "ms": 0, "conf": 0,
        "sim": 0, "on_features": 0, "anneal": 0, "hard_from": 1, "drop": 0,
    }  # fmt: skip

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        h, selector, blocks = self.hparams, model.select, model.backbone.family.blocks
        assert isinstance(selector, Selector)
        depth = len(model.backbone.model.get_submodule(blocks))
        if not h["block"] < depth:
            raise ValueError(f"hyper-parameter block must be below the number of blocks, {depth}, not {h['block']:g}")
        model.backbone.early_block = int(h["block"]) or model.backbone.early_block
        selector.gain = nn.Parameter(torch.tensor(float(h["gain"]))) if h["learn_gain"] else h["gain"]
        selector.spread = h["spread"]
        selector.everywhere = bool(h["everywhere"])
        selector.contrast = bool(h["contrast"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        h, terms = self.hparams, super().losses(out, batch)
        if h["ms"]:
            terms["L_ms"] = h["ms"] * mask_suppression(out.selection(), self.config.tau)
        if h["conf"]:
            terms["L_conf"] = h["conf"] * selected_confidence(out.logits, batch.label)
        if h["sim"]:
            terms["L_sim"] = h["sim"] * class_similarity(out.features, batch.label, out.logits.shape[1])
        return terms

    def _expert(self, out: Output) -> Tensor:
        return super()._expert(out._replace(context=out.features.detach()) if self.hparams["on_features"] else out)

    def begin_step(self, step: "Step") -> None:
        super().begin_step(step)
        assert isinstance(step.model.select, Selector)
        step.model.select.sharpen = self._sharpen((step.number + 1) / self.config.steps)

    def after_step(self, model: Classifier) -> None:
        super().after_step(model)
        assert isinstance(model.select, Selector)
        model.select.sharpen = None

    def _sharpen(self, done: float) -> Callable[[Tensor], Tensor] | None:
        """The function applied to log m (B, P) in a training pass, given the share of completed steps."""
        h = self.hparams
        if done < h["anneal"]:
            return lambda log_mask: done / h["anneal"] * log_mask
        if done > h["hard_from"]:
            return _hard
        if h["drop"]:
            return self._dropped
        return None

    def _dropped(self, log_mask: Tensor) -> Tensor:
        weak = log_mask < log_mask.mean(1, keepdim=True)
        return log_mask.masked_fill(weak & (torch.rand_like(log_mask) < self.hparams["drop"]), -14.0)

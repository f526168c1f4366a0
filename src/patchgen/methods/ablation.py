"""Rows 2.1 to 2.4 of the paper's ablation (Table 8): other selectors in PatchGen's place, under the same budget.

    2.1  StaticMask         m_p = sigmoid(a_p), the same for all images;  r+_j = sum_p rho_jp m_p z_pj
    2.2  ChannelMask        m_j = sigmoid(b_j);                           r+_j = m_j mean_p z_pj
    2.3  PlainAttention     no mask;                                      r+   = mean_p u_p
    2.4  ScaledAttention    as 2.3; its outgoing scores, scaled to [0, 1] in each image, are the input of L_ms

The paper names these rows without formulas: they are our interpretation. The rest, and the start, is PatchGen's. Where
no patch is left out (2.2, 2.3) the mask is one; 2.4 reports its scaled scores, which do not weight the patches. The
other rows are settings of `lp-ln`, `gmdg`, `patchgen-no-losses` and `patchgen`: `WEIGHT_ROWS` in report/ablation.py.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.patchgen import PatchGenSelect, PatchGenWithoutLosses
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import class_similarity, mask_suppression, selected_confidence
from patchgen.model.patchgen import PatchGen, PatchGenOutput
from patchgen.model.selector import Selector, log_of

if TYPE_CHECKING:
    from patchgen.train.loop import Step

Grid = tuple[int, int]


class Variant(PatchGen):
    """PatchGen without the parts in ``lacks``; the arguments are PatchGen's."""

    lacks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        for part in self.lacks:
            delattr(self, part)

    @classmethod
    def of(cls, whole: PatchGen, refine: str) -> Self:
        """The variant with the initial values of a PatchGen, and the same ``refine``."""
        dim, patches = whole.rho.shape
        variant = cls(dim, patches, grid=whole.grid, num_heads=whole.num_heads, refine=refine)
        variant.load_state_dict(whole.state_dict(), strict=False)
        return variant

    def forward(self, tokens: Tensor, grid: Grid | None = None, mask: Tensor | None = None) -> PatchGenOutput:
        grid = grid or self._grid_of(tokens.shape[1])
        return self._represent(*self._select(tokens, grid, mask))

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The mask (B, P), r+ and r- (B, D)."""
        raise NotImplementedError


class WithoutAttention(Variant):
    """Uses the backbone's tokens Z directly."""

    lacks: ClassVar[tuple[str, ...]] = ("qkv", "out", "log_temperature")

    def calibrate(self, tokens: Tensor) -> None:
        """Does nothing: there are no queries and keys to scale, and the mask starts at one half."""


class StaticMask(WithoutAttention):
    """Row 2.1: one learned weight per position, shared by all images."""

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        self.position = nn.Parameter(torch.zeros(num_patches))  # a

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if mask is None:
            position: Tensor = self.position  # (P,)
            if tuple(grid) != self.grid:
                image = position.view(1, 1, *self.grid)
                position = F.interpolate(image, size=tuple(grid), mode="bicubic", align_corners=False).flatten()
            mask = position.sigmoid().expand(len(tokens), -1)
        return mask, *self._aggregate(tokens, mask, self.rho_on(grid))


class ChannelMask(WithoutAttention):
    """Row 2.2: one learned weight per channel, on the mean of the tokens."""

    lacks = (*WithoutAttention.lacks, "rho")

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        self.channel = nn.Parameter(torch.zeros(dim))  # b

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        mask = tokens.new_ones(tokens.shape[:2]) if mask is None else mask  # (B, P)
        selected = self.channel.sigmoid() * (mask.to(tokens).unsqueeze(2) * tokens).mean(1)  # (B, D)
        return mask, selected, tokens.mean(1) - selected


class PlainAttention(Variant):
    """Row 2.3: PatchGen's attention, then the mean over the patches: the aggregator stays at 1 / P."""

    scaled = False

    def __init__(self, dim: int, num_patches: int, **options: Any) -> None:
        super().__init__(dim, num_patches, **options)
        self.rho.requires_grad_(False)

    def _select(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._heads(tokens)  # each (B, H, P, d_k)
        weight = tokens.new_ones(tokens.shape[:2]) if mask is None else mask  # (B, P)
        reported = weight
        if self.scaled and mask is None:
            score = self._score(q, k)  # (B, P)
            low, high = score.aminmax(dim=1, keepdim=True)
            reported = (score - low) / (high - low).clamp(min=torch.finfo(score.dtype).tiny)  # equal scores are all 0
        return reported, *self._aggregate(self._context(q, k, v), weight, self.rho_on(grid))


class ScaledAttention(PlainAttention):
    """Row 2.4: reports the scores of Eq. 3 before the sigmoid, scaled to [0, 1] within each image."""

    scaled = True


class OtherSelector(PatchGenWithoutLosses):
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


class SelectChoices(PatchGenSelect):
    """patchgen-select with its design choices as hyper-parameters; those not named here are attributes of `Selector`.

    block         the block after which the mask is computed; 0 means a third of the way up
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
        h = self.hparams
        terms = {
            "L_ms": h["ms"] * mask_suppression(out.selection(), self.config.tau),
            "L_conf": h["conf"] * selected_confidence(out.logits, batch.label),
            "L_sim": h["sim"] * class_similarity(out.features, batch.label, out.logits.shape[1]),
        }
        return super().losses(out, batch) | {name: term for name, term in terms.items() if h[name[2:]]}

    def _expert(self, out: Output) -> Tensor:
        return super()._expert(out._replace(context=out.features.detach()) if self.hparams["on_features"] else out)

    def begin_step(self, step: "Step") -> None:
        super().begin_step(step)
        assert isinstance(step.model.select, Selector)
        step.model.select.sharpen = partial(self._sharpen, (step.number + 1) / self.config.steps)

    def after_step(self, model: Classifier) -> None:
        super().after_step(model)
        assert isinstance(model.select, Selector)
        model.select.sharpen = None

    def _sharpen(self, done: float, log_mask: Tensor) -> Tensor:
        """log m (B, P) as a training pass uses it after a share of the steps."""
        h = self.hparams
        if done < h["anneal"]:
            return done / h["anneal"] * log_mask
        if done > h["hard_from"]:  # 0 or 1, with the gradient of log m
            return log_mask + (log_of((log_mask.exp() >= 0.5).float()) - log_mask).detach()
        if not h["drop"]:
            return log_mask
        weak = log_mask < log_mask.mean(1, keepdim=True)
        return log_mask.masked_fill(weak & (torch.rand_like(log_mask) < h["drop"]), -14.0)

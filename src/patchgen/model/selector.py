"""Selection inside the backbone: the class token reads only the patches that the mask selects.

    selector = Selector(backbone)
    tokens, mask, shown, early = selector(backbone, images)       # tokens as backbone(images), but CLS is selective

By the last layer every patch token has read every other one, so leaving patches out there leaves little out. Here the
mask is scored a third of the way up, where a token still tells of its own patch, and acts from there on:

    e = LayerNorm(patch tokens of the early block)
    m = sigmoid(mean over heads of <W_q e_p, mean W_k e> / sqrt(d_k) + b)           which patches (Eq. 3)
    r = m^2 / mean m^2                                                              how much of each is read
    CLS attends with softmax_p(<q_CLS, k_p> / sqrt(d) + log r_p)                    what the classifier reads

Patches attend to each other as they were trained to. Where m is the same everywhere nothing changes: the classifier is
then LayerNorm tuning with a linear head, bit for bit. Nothing is P x P: only the rows of CLS and registers have a bias.

With ``drop``, for predictions, patches that are shown below 0.5 leave the pass behind the early block or a later one.
The others keep their proportions and share what is read of all P patches, as if m were 0 for those that left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchgen.model.backbone import Backbone, Tokens
from patchgen.model.hooks import on_input
from patchgen.model.patchgen import LEAST, default_heads

SPREAD = 1.0  # standard deviation of the scores at the start
GAIN = 2.0  # exponent of m in what is read: lets one patch outweigh the rest
SELECTED = 0.5  # of the mask that is shown


Read = Callable[[Tensor, Callable[[Tensor], None]], Tokens]  # images, and what is shown their early tokens


class Selected(NamedTuple):
    tokens: Tokens  # cls has read the selected patches alone; patches (B, K, D) where others were dropped
    mask: Tensor  # (B, P)  m, or the mask that was given
    shown: Tensor  # (B, P)  the same on its calibrated level
    early: Tensor  # (B, P, D)  what the mask was scored on


class Selector(nn.Module):
    """A mask over the patches for the class token of a vision transformer.

    A network without class token (SigLIP, ResNet) is read by the mean of its last tokens, weighted by the mask.

    Attributes:
        gain: The power of m that is read.
        spread: Deviation of the scores at the start.
        contrast: Whether scores begin with contrast; otherwise at random, as published.
        everywhere: Whether patches read the selection too, not CLS and the registers alone.
        drop: How many blocks unselected patches pass before they leave, at least those up to the early one; None keeps
            them to the end (`patchgen.model.dropping`).
        sharpen: Changes log m (B, P) in a training pass, for methods that want it other than it is.
        level: (scale, shift) of log r for the mask that is shown, sigmoid(scale * log r + shift), so that 0.5 separates
            what is selected; set after training (`patchgen.train.level`). While the scale is 0, m itself is shown. It
            does not touch what the classifier reads.
    """

    level: Tensor

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        dim = backbone.dim
        self.gain: float | nn.Parameter = GAIN
        self.spread, self.everywhere, self.contrast = SPREAD, False, True
        self.drop: int | None = None
        self.sharpen: Callable[[Tensor], Tensor] | None = None
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.shift = nn.Parameter(torch.zeros(()))  # b
        self.register_buffer("level", torch.zeros(2))
        nn.init.xavier_uniform_(self.key.weight)
        if not backbone.family.convolutional and backbone.num_prefix_tokens:
            _require_fused_attention(backbone)

    def score(self, early: Tensor) -> Tensor:
        """What goes into the sigmoid, (B, P). The mean over targets of <q_p, k_q> is <q_p, k of the mean target>.

        <W_q e_p + b_q, k> is <e_p, W_q^T k> + <b_q, k>, so no patch is projected: P x D products, not P x D^2.
        """
        key = self.key(early.mean(1))  # (B, D)
        scores = torch.einsum("bpd,bd->bp", early, key @ self.query.weight) + (key @ self.query.bias).unsqueeze(1)
        return scores / math.sqrt(default_heads(early.shape[-1]) * early.shape[-1]) + self.shift

    @torch.no_grad()
    def start(self, early: Tensor) -> None:
        """Begin with contrast: a patch scores high where it is unlike the mean of its image.

        W_q = -W_k, and the biases take the mean source token away. The scores then get the deviation ``spread`` and the
        mean 0. Everything stays free to learn.
        """
        centre = early.flatten(0, 1).mean(0)  # (D,)
        if self.contrast:
            self.query.weight.copy_(-self.key.weight)
        self.key.bias.copy_(-self.key.weight @ centre)
        self.query.bias.copy_(-self.query.weight @ centre)
        spread = self.score(early).std()
        if spread > 1e-6:  # blank images say nothing of it
            for part in (self.query, self.key):  # scores are bilinear in the two
                part.weight.mul_((self.spread / spread).sqrt())
                part.bias.mul_((self.spread / spread).sqrt())
        self.shift.sub_(self.score(early).mean())

    def forward(
        self, backbone: Backbone, images: Tensor, mask: Tensor | None = None, read: Read | None = None
    ) -> Selected:
        """Read images.

        Args:
            images: (B, 3, H, W), normalised.
            mask: (B, P) to use in place of the learned one, such as the truth where it is known.
            read: A pass of the backbone that is other than the plain one, such as one with prompts.
        """
        reading = _Reading(self, mask)
        with reading, self._dropping(backbone, reading):
            tokens = (read or backbone)(images, reading.see)
        if backbone.num_prefix_tokens == 0:
            weight = reading.bias.exp().unsqueeze(-1)  # (B, K, 1), sum P
            share = weight.shape[1] / reading.mask.shape[1]  # 1 where nothing was dropped
            tokens = tokens._replace(cls=(weight * tokens.patches).mean(1) * share)
        return Selected(tokens, reading.mask, reading.shown, reading.early)

    def _dropping(self, backbone: Backbone, reading: _Reading) -> AbstractContextManager[Any]:
        if self.drop is None:
            return nullcontext()
        return on_input(backbone.model.get_submodule(backbone.family.blocks)[self.drop], reading.keep)


class _Reading(TorchFunctionMode):
    """One pass: once the early tokens are seen, the rows of the prefix tokens attend with the mask's bias."""

    early: Tensor
    mask: Tensor
    shown: Tensor
    bias: Tensor  # (B, P) log r; (B, K) of the patches that stay where others are dropped
    padding: Tensor | None = None  # (B, K) 0, and -inf for places of images that keep fewer than K patches

    def __init__(self, selector: Selector, given: Tensor | None) -> None:
        super().__init__()
        self.selector, self.given, self.acts = selector, given, False

    def see(self, early: Tensor) -> None:
        self.early = F.layer_norm(early.float(), early.shape[-1:])
        given, selector = self.given, self.selector
        log_mask = F.logsigmoid(selector.score(self.early).float()) if given is None else log_of(given)
        self.mask = log_mask.exp() if given is None else given
        self.bias = relative(selector.gain * (selector.sharpen(log_mask) if selector.sharpen else log_mask))  # log r
        self.shown = self._shown()
        self.acts = given is None or bool((given != given[:, :1]).any())  # else all is read alike

    def _shown(self) -> Tensor:
        if self.given is not None:
            return self.given
        level = self.selector.level
        return torch.where(level[0] > 0, (level[0] * self.bias + level[1]).sigmoid(), self.mask)

    def keep(self, hidden: Tensor) -> Tensor:
        """Tokens (B, T, D) without unselected patches: (B, T - P + K, D), K the most that any image has selected."""
        keep = (self.shown >= SELECTED) | (self.shown == self.shown.amax(1, keepdim=True))  # never none
        if bool(keep.all()):
            return hidden
        before, most = hidden.shape[1] - keep.shape[1], int(keep.sum(1).max())
        order = keep.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # (B, K), the kept ones first
        chosen = keep.gather(1, order)
        self.bias = relative(self.bias.masked_fill(~keep, -torch.inf)).gather(1, order)
        self.padding = None if bool(chosen.all()) else torch.zeros_like(self.bias).masked_fill(~chosen, -torch.inf)
        patches = hidden[:, before:].gather(1, order.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        return torch.cat([hidden[:, :before], patches], 1)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.acts:
            self.acts = False  # its own calls are plain, also where an exporter asks every mode again
            try:
                return self._attend(*args, **(kwargs or {}))
            finally:
                self.acts = True
        return func(*args, **(kwargs or {}))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Attention (B, H, T, d) in which the T - P queries before the patches see the patch keys with the bias."""
        before = k.shape[-2] - self.bias.shape[1]
        if not before and self.padding is None:  # no class token to read for
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)

        def on_keys(values: Tensor) -> Tensor:  # (B, 1, 1, T): 0 on the keys before the patches
            return F.pad(values, (before, 0))[:, None, None].to(q.dtype)

        bias, padding = on_keys(self.bias), None if self.padding is None else on_keys(self.padding)
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # transformers makes one of ones for an exporter
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        whole = None if attn_mask is None else attn_mask.expand(-1, -1, q.shape[-2], -1)  # (B, 1, T, T)

        def rows(start: int, end: int | None, added: Tensor | None) -> Tensor:
            mask = added
            if whole is not None:
                mask = whole[..., start:end, :] + (0 if added is None else added)
            return F.scaled_dot_product_attention(q[..., start:end, :], k, v, attn_mask=mask, **options)

        if self.selector.everywhere or not before:
            return rows(0, None, bias if self.selector.everywhere else padding)
        return torch.cat([rows(0, before, bias), rows(before, None, padding)], -2)


def log_of(mask: Tensor) -> Tensor:
    """log m (B, P) of a mask that may hold zeros."""
    return mask.float().clamp(min=LEAST).log()


def relative(log_weight: Tensor) -> Tensor:
    """log of weights over their mean within the image, (B, P): 0 where a patch counts as much as the average one."""
    return log_weight - log_weight.logsumexp(1, keepdim=True) + math.log(log_weight.shape[1])


@torch.no_grad()
def _require_fused_attention(backbone: Backbone) -> None:
    """One small image shows whether every later block runs attention where the mask can act."""
    side, blocks = 4 * backbone.patch_size, len(backbone.model.get_submodule(backbone.family.blocks))
    weight = next(backbone.parameters())
    images = torch.arange(3 * side * side, device=weight.device).sin().view(1, 3, side, side).to(weight.dtype)
    reading = _Probe(backbone.num_prefix_tokens + 16)
    with reading:
        backbone(images, reading.see)
    if reading.calls != blocks - backbone.early_block:
        raise ValueError(
            f"patchgen-select needs a vision transformer with fused attention in each block; {backbone.source!r} "
            f"({backbone.model_type}) ran it {reading.calls} times in {blocks - backbone.early_block} blocks. "
            "Choose --method patchgen-attend, which selects behind the backbone, or another --backbone"
        )


class _Probe(TorchFunctionMode):
    """Counts attention over all tokens behind the early block."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.calls, self.early = tokens, 0, False

    def see(self, early: Tensor) -> None:
        self.early = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.early:
            self.calls += args[0].shape[-2] == args[1].shape[-2] == self.tokens
        return func(*args, **(kwargs or {}))

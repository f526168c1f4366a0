"""Selection inside the backbone: the class token reads only the patches that the mask selects.

    selector = Selector(backbone)
    tokens, mask, shown, early = selector(backbone, images)       # as backbone(images), but CLS is selective

The mask is computed after a third of the blocks, where a token still describes mostly its own patch, and acts in all
later ones; attention between patches is unchanged, and a uniform m changes nothing:

    e = LayerNorm(patch tokens of the early block)
    m = sigmoid(mean over heads of <W_q e_p, mean W_k e> / sqrt(d_k) + b)           which patches (Eq. 3)
    r = m^2 / mean m^2                                                              relative weight of each patch
    CLS attends with softmax_p(<q_CLS, k_p> / sqrt(d) + log r_p)                    what the classifier reads
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchgen.model.backbone import Backbone, Tokens
from patchgen.model.patchgen import LEAST, default_heads

SPREAD = 1.0  # standard deviation of the scores at the start
GAIN = 2.0  # exponent of m in the weight r: lets one patch outweigh the rest

Read = Callable[[Tensor, Callable[[Tensor], None]], Tokens]  # takes images and a callback for their early tokens


class Selected(NamedTuple):
    tokens: Tokens  # cls reads the patches by their weight r
    mask: Tensor  # (B, P)  m, or the mask passed by the caller
    shown: Tensor  # (B, P)  the mask to display, calibrated to `level`
    early: Tensor  # (B, P, D)  the tokens from which the mask was computed


class Selector(nn.Module):
    """A mask over the patches that the class token of a vision transformer attends to.

    A network without a class token (SigLIP, ResNet) is pooled by the mean of its last tokens, weighted by r.
    """

    # (scale, shift) of the displayed mask, sigmoid(scale * log r + shift), calibrated after training so that patches
    # above 0.5 are the selected ones (`patchgen.train.close`). While the scale is 0, m is displayed.
    level: Tensor

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        dim = backbone.dim
        self.gain: float | nn.Parameter = GAIN
        self.spread = SPREAD
        self.everywhere = False  # the bias also applies to the patches' attention, not only to CLS and the registers
        self.contrast = True  # patches unlike their image's mean start with high scores; else at random, as published
        self.sharpen: Callable[[Tensor], Tensor] | None = None  # applied to log m (B, P) in training passes
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.shift = nn.Parameter(torch.zeros(()))  # b
        self.register_buffer("level", torch.zeros(2))
        nn.init.xavier_uniform_(self.key.weight)
        if not backbone.family.convolutional and backbone.num_prefix_tokens:
            self._require_fused_attention(backbone)

    def score(self, early: Tensor) -> Tensor:
        """The argument of the sigmoid, (B, P). The mean of <q_p, k_q> over q is <q_p, key of the mean token>.

        <W_q e_p + b_q, k> is <e_p, W_q^T k> + <b_q, k>, so patches are not projected: P x D products, not P x D^2.
        """
        key = self.key(early.mean(1))  # (B, D)
        scores = torch.einsum("bpd,bd->bp", early, key @ self.query.weight) + (key @ self.query.bias).unsqueeze(1)
        return scores / math.sqrt(default_heads(early.shape[-1]) * early.shape[-1]) + self.shift

    @torch.no_grad()
    def start(self, early: Tensor) -> None:
        """Set W_q = -W_k, and biases that subtract the mean token; scale the scores to ``spread``, with mean 0."""
        centre = early.flatten(0, 1).mean(0)  # (D,)
        if self.contrast:
            self.query.weight.copy_(-self.key.weight)
        self.key.bias.copy_(-self.key.weight @ centre)
        self.query.bias.copy_(-self.query.weight @ centre)
        spread = self.score(early).std()
        if spread > 1e-6:  # not on blank images
            for part in (self.query, self.key):  # scores are bilinear in the two
                part.weight.mul_((self.spread / spread).sqrt())
                part.bias.mul_((self.spread / spread).sqrt())
        self.shift.sub_(self.score(early).mean())

    @torch.no_grad()
    def _require_fused_attention(self, backbone: Backbone) -> None:
        """Run one small image to check that the mask acts in every later block."""
        side, later = 4 * backbone.patch_size, len(backbone.blocks) - backbone.early_block
        weight = next(backbone.parameters())
        reading = _Reading(self, None)
        with reading:
            backbone(weight.new_zeros(1, 3, side, side), reading.see)
        if reading.calls != later:
            raise ValueError(
                f"patchgen-select needs a vision transformer with fused attention in each block; {backbone.source!r} "
                f"({backbone.model_type}) ran it {reading.calls} times in {later} blocks. Choose --method "
                "patchgen-attend, which selects after the backbone, or another --backbone"
            )

    def forward(
        self, backbone: Backbone, images: Tensor, mask: Tensor | None = None, read: Read | None = None
    ) -> Selected:
        """Run the backbone on normalised images; ``mask`` (B, P) replaces the learned one, ``read`` the plain pass."""
        reading = _Reading(self, mask)
        with reading:
            tokens = (read or backbone)(images, reading.see)
        if backbone.num_prefix_tokens == 0:
            weight = reading.bias.exp().unsqueeze(-1)  # (B, P, 1), sum P
            tokens = tokens._replace(cls=(weight * tokens.patches).mean(1))
        return Selected(tokens, reading.mask, reading.shown, reading.early)


class _Reading(TorchFunctionMode):
    """One forward pass: after the early block, the prefix tokens attend to the patches with the bias log r."""

    early: Tensor
    mask: Tensor
    shown: Tensor
    bias: Tensor  # (B, P) log r

    def __init__(self, selector: Selector, given: Tensor | None) -> None:
        super().__init__()
        self.selector, self.given, self.acts = selector, given, False
        self.calls = 0  # of attention between all tokens, with the bias

    def see(self, early: Tensor) -> None:
        self.early = F.layer_norm(early.float(), early.shape[-1:])
        given, selector, (scale, shift) = self.given, self.selector, self.selector.level
        log_mask = F.logsigmoid(selector.score(self.early).float()) if given is None else log_of(given)
        self.mask = log_mask.exp() if given is None else given
        self.bias = relative(selector.gain * (selector.sharpen(log_mask) if selector.sharpen else log_mask))  # log r
        calibrated = torch.where(scale > 0, (scale * self.bias + shift).sigmoid(), self.mask)
        self.shown = calibrated if given is None else given
        self.acts = given is None or bool((given != given[:, :1]).any())  # a uniform mask changes nothing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.acts:
            self.acts = False  # calls made by _attend itself pass through, even if an exporter re-enters this mode
            try:
                return self._attend(*args, **(kwargs or {}))
            finally:
                self.acts = True
        return func(*args, **(kwargs or {}))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Attention (B, H, T, d) in which the T - P prefix queries see the patch keys with the bias."""
        before = k.shape[-2] - self.bias.shape[1]
        if before < 1:  # no class token, or attention within windows
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
        self.calls += 1
        bias = F.pad(self.bias, (before, 0))[:, None, None].to(q.dtype)  # (B, 1, 1, T): 0 on the prefix keys
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # transformers passes all ones during export
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        whole = None if attn_mask is None else attn_mask.expand(-1, -1, q.shape[-2], -1)  # (B, 1, T, T)

        def rows(part: slice, added: Tensor | None) -> Tensor:
            mask = added if whole is None else whole[..., part, :] + (0 if added is None else added)
            return F.scaled_dot_product_attention(q[..., part, :], k, v, attn_mask=mask, **options)

        if self.selector.everywhere:
            return rows(slice(None), bias)
        return torch.cat([rows(slice(before), bias), rows(slice(before, None), None)], -2)


def log_of(mask: Tensor) -> Tensor:
    """log m (B, P) for a mask that may contain zeros."""
    return mask.float().clamp(min=LEAST).log()


def relative(log_weight: Tensor) -> Tensor:
    """Log of the weights divided by their mean within the image, (B, P): 0 for a patch of average weight."""
    return log_weight - log_weight.logsumexp(1, keepdim=True) + math.log(log_weight.shape[1])

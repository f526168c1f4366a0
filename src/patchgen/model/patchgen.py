"""PatchGen: learn, for each image, a soft mask over the patches that suffice to predict its label.

    module = PatchGen(dim=384, num_patches=256)
    out = module(tokens)                       # tokens (B, P, D): patch tokens of any vision transformer
    out.mask, out.selected, out.complementary  # (B, P), (B, D), (B, D)

The whole method in five lines (section 4 of the paper; Eq. 3 is the mask):

    m = sigmoid(mean over heads and targets of <q, k> / sqrt(d_k))       the mask: which patches are selected
    U = softmax(<q, k> / (sqrt(d_k) exp(t))) v                           patch features, in context
    r+ = sum_p rho_p m_p u_p            r- = sum_p rho_p (1 - m_p) u_p   the selected patches, and the rest
    z+ = F(g(r+) * r+)                  z- = F(g(r+) * r-)               one gate and one refinement for both
    label = head(z+)

No P x P matrix is stored: the mask needs only the mean key, and the context uses fused attention.

As published, attention mixes all patches before the mask acts, and the patches most similar to the rest of their image
start with the highest scores. Two options change that, one line each:

    attend="selected"    U = softmax(<q, k> / (sqrt(d_k) exp(t)) + log m) v     patches attend to selected patches
    start="contrast"     W_q = -W_k                                             patches unlike the image mean score high
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

REFINE: dict[str, Callable[[int], nn.Module]] = {  # the map F
    "linear": lambda dim: nn.Linear(dim, dim),
    "ln-linear": lambda dim: nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim)),
    "linear-ln": lambda dim: nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim)),
}
ATTEND = ("all", "selected")
START = ("xavier", "contrast")
RHO_START = ("mean", "conv")
LEAST = 1e-6  # smallest mask value inside attention: a patch with mask 0 keeps e^-14 of its weight
WIDTH = 8  # fused kernels require a head width that is a multiple of this
MODERATE = (0.2, 0.8)  # range in which the mean mask may start


class PatchGenOutput(NamedTuple):
    mask: Tensor  # (B, P)  m, in (0, 1)
    selected: Tensor  # (B, D)  z+, what the classifier reads
    complementary: Tensor  # (B, D)  z-, what the mask leaves out


class PatchGen(nn.Module):
    """The soft predictive-subset module.

    Args:
        dim: Width D of the patch tokens.
        num_patches: Number of patches P per image; the aggregator has one weight per channel and patch.
        grid: Patch layout (h, w); square by default.
        num_heads: Attention heads H; D / 64 by default.
        gate_reduction: Bottleneck of the channel gate, D -> D / gate_reduction -> D.
        refine: The map F: "linear", "ln-linear" (LayerNorm first) or "linear-ln" (LayerNorm last).
        attend: What a patch attends to: "all" patches, as published, or the "selected" ones. In that case z- attends to
            the unselected ones, without gradient.
        start: Initial scores: "xavier", as published, or "contrast", minus the similarity to the image mean.
        rho_start: Initial aggregator: "mean" over patches, or "conv", the default of a depthwise convolution over them.
        spread: Standard deviation of the scores after ``calibrate``.
    """

    def __init__(
        self,
        dim: int,
        num_patches: int,
        grid: tuple[int, int] | None = None,
        num_heads: int | None = None,
        gate_reduction: int = 4,
        refine: str = "ln-linear",
        attend: str = "all",
        start: str = "xavier",
        rho_start: str = "mean",
        spread: float = 0.35,
    ) -> None:
        super().__init__()
        choices = {"refine": (refine, REFINE), "attend": (attend, ATTEND), "start": (start, START)}
        for name, (value, known) in {**choices, "rho_start": (rho_start, RHO_START)}.items():
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        self.attend, self.start, self.spread = attend, start, spread
        self.grid = grid or square_grid(num_patches)
        if math.prod(self.grid) != num_patches:
            raise ValueError(f"grid {self.grid} has {math.prod(self.grid)} cells, but num_patches is {num_patches}")
        self.num_heads = num_heads or default_heads(dim)
        if dim % self.num_heads:
            raise ValueError(f"num_heads must divide dim: {dim} % {self.num_heads} != 0; try {default_heads(dim)}")
        hidden = max(dim // gate_reduction, 1)

        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.log_temperature = nn.Parameter(torch.zeros(()))  # t
        self.rho = nn.Parameter(torch.full((dim, num_patches), 1 / num_patches))
        if rho_start == "conv":
            nn.init.uniform_(self.rho, -(num_patches**-0.5), num_patches**-0.5)
        self.gate = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.Sigmoid())
        self.refine = REFINE[refine](dim)
        # Xavier gives scores that differ between patches: with much smaller weights, attention would be uniform and all
        # u_p equal, so the mask could only move as a whole
        for weight in (*self.qkv.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    @torch.no_grad()
    def calibrate(self, tokens: Tensor) -> None:
        """Scale queries and keys so that the mask scores start with standard deviation ``spread`` on real tokens.

        Backbones differ in the scale of their final LayerNorm: uncalibrated, DINOv2 starts with masks from 0.35 to 0.65
        and a supervised ViT-Ti with saturated ones. Nearly equal tokens can make all scores large: if the mean mask
        would start outside ``MODERATE``, the query bias subtracts the mean token, which centres the scores near 0.
        """
        dim = tokens.shape[-1]
        if self.start == "contrast":  # W_q = -W_k: patches similar to their image's mean score low
            centre, key = tokens.flatten(0, 1).mean(0), self.qkv.weight[dim : 2 * dim]
            self.qkv.weight[:dim] = -key
            self.qkv.bias[:dim], self.qkv.bias[dim : 2 * dim] = key @ centre, -key @ centre
        mean = self._scale_scores(tokens)
        if not MODERATE[0] <= mean <= MODERATE[1]:
            self.qkv.bias[:dim] = -self.qkv.weight[:dim] @ tokens.flatten(0, 1).mean(0)
            self._scale_scores(tokens)

    def _scale_scores(self, tokens: Tensor) -> float:
        """Scale the scores to standard deviation ``spread`` and return the mean mask; blank images change nothing."""
        q, k, _ = self._heads(tokens)
        score = self._score(q, k)
        deviation = score.std()
        if not deviation > 1e-3:
            return 0.5
        for tensor in (self.qkv.weight, self.qkv.bias):
            tensor[: 2 * tokens.shape[-1]] *= (self.spread / deviation).sqrt()  # scores are bilinear in q and k
        return float((score * self.spread / deviation).sigmoid().mean())

    def forward(
        self, tokens: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> PatchGenOutput:
        """Tokens (B, P, D) to the mask and the two representations; ``mask`` (B, P) replaces the learned one.

        The patch layout ``grid`` (h, w) is needed only where it is neither the trained layout nor square.
        """
        rho = self.rho_on(grid or self._grid_of(tokens.shape[1]))  # (D, P)
        q, k, v = self._heads(tokens)  # each (B, H, P, d_k)
        mask = self._score(q, k).sigmoid() if mask is None else mask  # (B, P)
        if self.attend == "all":
            return self._represent(mask, *self._aggregate(self._context(q, k, v), mask, rho))
        selected, _ = self._aggregate(self._context(q, k, v, mask), mask, rho)
        with torch.no_grad():
            _, rest = self._aggregate(self._context(q, k, v, 1 - mask), mask, rho)
        out = self._represent(mask, selected, rest)
        return out._replace(complementary=out.complementary.detach())

    def _heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, P, 3, H, d_k)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        return q, k, v

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        """The argument of the sigmoid in Eq. 3, (B, P). The mean of <q_p, k_q> over q is <q_p, mean k>: no P x P."""
        mean_key = _wide(k).mean(2, keepdim=True)  # (B, H, 1, d_k)
        score = (_wide(q) * mean_key).sum(-1) / math.sqrt(q.shape[-1])  # (B, H, P)
        return score.mean(1)  # (B, P)

    def _context(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> Tensor:
        """U (B, P, D): attention with a learned temperature, applied to the query so that t receives a gradient.

        An optional ``weight`` (B, P) multiplies the attention to each key: its logarithm is one extra channel of the
        keys, so attention stays fused and linear in P, and the weight receives a gradient.
        """
        q, width = q * torch.exp(-self.log_temperature).to(q.dtype), q.shape[-1]
        if weight is not None:
            bias = weight.clamp(min=LEAST).log().to(k.dtype)[:, None, :, None].expand(-1, k.shape[1], -1, 1)
            q = torch.cat([q, torch.full_like(bias, math.sqrt(width))], -1)
            k = torch.cat([k, bias], -1)
            q, k, v = (F.pad(part, (0, width + WIDTH - part.shape[-1])) for part in (q, k, v))
        u = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(width))[..., :width]  # (B, H, P, d_k)
        return self.out(u.transpose(1, 2).flatten(2))

    def _aggregate(self, context: Tensor, mask: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Aggregate A_rho for m and 1 - m together: it is linear in the mask, so r- is the full sum minus r+."""
        with torch.autocast(context.device.type, enabled=False):  # half precision is too coarse for sums over P
            weighted = _wide(context) * _wide(rho).T  # (B, P, D)
            selected = (mask.to(weighted.dtype).unsqueeze(1) @ weighted).squeeze(1)
            return selected.to(rho.dtype), (weighted.sum(1) - selected).to(rho.dtype)

    def _represent(self, mask: Tensor, selected: Tensor, rest: Tensor) -> PatchGenOutput:
        """z+ and z- from the aggregates r+ and r-, (B, D) each; r+ computes the gate for both."""
        gate = self.gate(selected)  # (B, D)
        return PatchGenOutput(mask, self.refine(gate * selected), self.refine(gate * rest))

    def _grid_of(self, num_patches: int) -> tuple[int, int]:
        return self.grid if num_patches == math.prod(self.grid) else square_grid(num_patches)

    def rho_on(self, grid: tuple[int, int]) -> Tensor:
        """The aggregator resized to another patch grid, (D, h * w): bicubic, rescaled so that sums keep their size."""
        if tuple(grid) == self.grid:
            return self.rho
        image = self.rho.unflatten(1, self.grid).unsqueeze(0)  # (1, D, h, w)
        resized = F.interpolate(image, size=tuple(grid), mode="bicubic", align_corners=False)[0].flatten(1)
        return resized * (self.rho.shape[1] / resized.shape[1])


def square_grid(num_patches: int) -> tuple[int, int]:
    """The square layout (h, w) of P patches; raises ValueError with the nearest squares if P is not a square."""
    side = math.isqrt(max(num_patches, 0))
    if side * side != num_patches or side == 0:
        near = f"{max(side, 1) ** 2} or {(side + 1) ** 2}"
        raise ValueError(f"{num_patches} patches form no square grid (nearest: {near}); pass grid=(height, width)")
    return side, side


def default_heads(dim: int) -> int:
    """H = D / 64, or the smallest number of heads that divides D into widths d_k of at most 64."""
    return next(heads for heads in range(math.ceil(dim / 64), dim + 1) if dim % heads == 0)


def _wide(value: Tensor) -> Tensor:
    """Cast to at least float32: half precision is fine for matrix products but too coarse for sums over patches."""
    return value.to(torch.promote_types(value.dtype, torch.float32))

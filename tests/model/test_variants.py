"""The ablation's selectors against their formulas, written out in float64, and what of PatchGen they keep."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.methods.ablation import ChannelMask, PlainAttention, ScaledAttention, StaticMask, Variant
from patchgen.model.patchgen import PatchGen, PatchGenOutput

DIM, PATCHES, HEADS = 12, 9, 3
KINDS: tuple[type[Variant], ...] = (StaticMask, ChannelMask, PlainAttention, ScaledAttention)
ATTENTION = {"qkv.weight", "qkv.bias", "out.weight", "out.bias", "log_temperature"}
SHARED = {"gate.0.weight", "gate.0.bias", "gate.2.weight", "gate.2.bias", "refine.weight", "refine.bias"}


def tokens(patches: int = PATCHES) -> Tensor:
    return torch.randn(4, patches, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def make(kind: type[Variant]) -> Variant:
    """A variant in float64, every trained value moved away from its special start."""
    torch.manual_seed(0)
    module = kind.of(PatchGen(DIM, PATCHES, num_heads=HEADS, refine="linear"), "linear").double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    return module


def expected(module: Variant, selected: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """z+ and z- from the aggregates: one gate, one linear map."""
    w = module.state_dict()
    hidden = (selected @ w["gate.0.weight"].T + w["gate.0.bias"]).clamp(min=0)
    gate = torch.sigmoid(hidden @ w["gate.2.weight"].T + w["gate.2.bias"])
    plus, minus = ((gate * part) @ w["refine.weight"].T + w["refine.bias"] for part in (selected, rest))
    return plus, minus


def same(out: PatchGenOutput, mask: Tensor, plus: Tensor, minus: Tensor) -> bool:
    """Whether all three agree to double precision, shapes included."""
    pairs = ((out.mask, mask), (out.selected, plus), (out.complementary, minus))
    return all(
        mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-7, atol=1e-7) for mine, theirs in pairs
    )


def context_and_scores(module: Variant, z: Tensor) -> tuple[Tensor, Tensor]:
    """U (B, P, D) and the outgoing scores (B, P), by every P x P score."""
    w, width = module.state_dict(), DIM // HEADS
    q, k, v = (z @ w["qkv.weight"][i : i + DIM].T + w["qkv.bias"][i : i + DIM] for i in (0, DIM, 2 * DIM))
    heads, outgoing = [], torch.zeros(z.shape[:2], dtype=z.dtype)
    for a in range(HEADS):
        part = slice(a * width, (a + 1) * width)
        score = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)  # (B, P, P)
        heads.append((score / w["log_temperature"].exp()).softmax(-1) @ v[..., part])
        outgoing += score.mean(2) / HEADS
    return torch.cat(heads, -1) @ w["out.weight"].T + w["out.bias"], outgoing


def test_static_mask_weighs_positions_of_the_tokens_through_rho() -> None:
    module, z = make(StaticMask), tokens()
    m = torch.sigmoid(module.position)
    plus = torch.einsum("jp,p,bpj->bj", module.rho, m, z)
    minus = torch.einsum("jp,p,bpj->bj", module.rho, 1 - m, z)
    assert same(module(z), m.expand(4, -1), *expected(module, plus, minus))


def test_channel_mask_weighs_channels_of_the_mean_token() -> None:
    module, z = make(ChannelMask), tokens()
    m, mean = torch.sigmoid(module.channel), z.mean(1)
    assert same(module(z), torch.ones(4, PATCHES).double(), *expected(module, m * mean, (1 - m) * mean))


def test_plain_attention_is_the_mean_of_u() -> None:
    module, z = make(PlainAttention), tokens()
    mean = context_and_scores(module, z)[0].mean(1)
    assert same(module(z), torch.ones(4, PATCHES).double(), *expected(module, mean, torch.zeros_like(mean)))


def test_scaled_attention_differs_in_what_it_shows_alone() -> None:
    module, z = make(ScaledAttention), tokens()
    context, score = context_and_scores(module, z)
    low, high = score.min(1, keepdim=True).values, score.max(1, keepdim=True).values
    mean = context.mean(1)
    out = module(z)
    assert same(out, (score - low) / (high - low), *expected(module, mean, torch.zeros_like(mean)))
    assert out.mask.min(1).values.tolist() == [0] * 4 and out.mask.max(1).values.tolist() == [1] * 4
    flat = module(z[:, :1].expand(-1, PATCHES, -1)).mask  # no patch stands out: nothing to scale by
    assert flat.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_mask_weighs_the_patches_and_is_what_is_returned(kind: type[Variant]) -> None:
    module, z = make(kind), tokens()
    given = (torch.rand(4, PATCHES, generator=torch.Generator().manual_seed(1)) > 0.5).double()
    seen = z if kind in (StaticMask, ChannelMask) else context_and_scores(module, z)[0]
    rho = module.rho if kind is StaticMask else torch.full((DIM, PATCHES), 1 / PATCHES).double()
    plus, whole = torch.einsum("jp,bp,bpj->bj", rho, given, seen), torch.einsum("jp,bpj->bj", rho, seen)
    if kind is ChannelMask:
        plus = plus * torch.sigmoid(module.get_parameter("channel"))
    assert same(module(z, mask=given), given, *expected(module, plus, whole - plus))


PARTS: dict[type[Variant], set[str]] = {
    StaticMask: SHARED | {"rho", "position"},
    ChannelMask: SHARED | {"channel"},
    PlainAttention: SHARED | ATTENTION,
    ScaledAttention: SHARED | ATTENTION,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_learns_is_what_its_row_has_and_gradients_reach_it(kind: type[Variant]) -> None:
    module = make(kind)
    out = module(tokens())
    (out.selected.square().sum() + out.mask.sum() * 0).backward()
    reached = {n for n, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {n for n, p in module.named_parameters() if p.requires_grad} == PARTS[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refine", ["linear", "ln-linear", "linear-ln"])
def test_shared_parts_start_with_patchgens_values(kind: type[Variant], refine: str) -> None:
    whole = PatchGen(DIM, PATCHES, num_heads=HEADS, refine=refine)
    own = kind.of(whole, refine).state_dict()
    both = own.keys() & whole.state_dict().keys()
    assert {name.split(".")[0] for name in both} >= {"gate", "refine"}
    assert all(torch.equal(own[name], whole.state_dict()[name]) for name in both)


def test_the_static_mask_is_resized_before_the_sigmoid() -> None:
    module = make(StaticMask)
    image = module.position.view(1, 1, 3, 3)
    large = F.interpolate(image, size=(6, 6), mode="bicubic", align_corners=False).flatten().sigmoid()
    torch.testing.assert_close(module(tokens(36)).mask[0], large)

"""The module against a slow version in float64 that forms every P x P score and loops over heads and patches."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.model.patchgen import REFINE, PatchGen, PatchGenOutput, default_heads, square_grid

Weights = dict[str, Tensor]


def make(refine: str = "linear", dim: int = 12, patches: int = 9, heads: int = 3, **more: object) -> PatchGen:
    """A small module, every parameter moved away from its special starting value."""
    torch.manual_seed(0)
    module = PatchGen(dim, patches, num_heads=heads, refine=refine, **more)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def slow(w: Weights, tokens: Tensor, heads: int, refine: str) -> PatchGenOutput:
    """Section 4 of the paper, written out: w holds the module's state_dict in float64."""
    per_image = [_slow_image(w, z, heads) for z in tokens]
    mask, plus, minus = (torch.stack(part) for part in zip(*per_image, strict=True))
    hidden = (plus @ w["gate.0.weight"].T + w["gate.0.bias"]).clamp(min=0)
    gate = 1 / (1 + torch.exp(-(hidden @ w["gate.2.weight"].T + w["gate.2.bias"])))
    return PatchGenOutput(mask, _slow_refine(w, gate * plus, refine), _slow_refine(w, gate * minus, refine))


def _slow_image(w: Weights, z: Tensor, heads: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, r+ and r- of an image; ``factor`` (P,) multiplies the attention to each key."""
    patches, dim = z.shape
    width = dim // heads
    query, key, value = (
        z @ w["qkv.weight"][i * dim : (i + 1) * dim].T + w["qkv.bias"][i * dim : (i + 1) * dim] for i in range(3)
    )
    outgoing = [z.new_zeros(()) for _ in range(patches)]  # double sum over heads and targets
    context: list[list[Tensor]] = [[] for _ in range(patches)]
    for a in range(heads):
        part = slice(a * width, (a + 1) * width)
        for p in range(patches):
            scores = torch.stack([query[p, part] @ key[q, part] / math.sqrt(width) for q in range(patches)])
            outgoing[p] = outgoing[p] + scores.sum()
            weight = torch.exp(scores / torch.exp(w["log_temperature"])) * (1 if factor is None else factor)
            context[p].append(sum(weight[q] * value[q, part] for q in range(patches)) / weight.sum())
    mask = torch.stack([1 / (1 + torch.exp(-total / (heads * patches))) for total in outgoing])
    u = torch.stack([torch.cat(parts) @ w["out.weight"].T + w["out.bias"] for parts in context])
    rho = w["rho"]
    plus = torch.stack([sum(rho[j, p] * mask[p] * u[p, j] for p in range(patches)) for j in range(dim)])
    minus = torch.stack([sum(rho[j, p] * (1 - mask[p]) * u[p, j] for p in range(patches)) for j in range(dim)])
    return mask, plus, minus


def _slow_refine(w: Weights, x: Tensor, refine: str) -> Tensor:
    def norm(y: Tensor, at: str) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{at}.weight"] + w[f"{at}.bias"]

    if refine == "linear":
        return x @ w["refine.weight"].T + w["refine.bias"]
    if refine == "ln-linear":
        return norm(x, "refine.0") @ w["refine.1.weight"].T + w["refine.1.bias"]
    return norm(x @ w["refine.0.weight"].T + w["refine.0.bias"], "refine.1")


def weighted_sum(out: PatchGenOutput) -> Tensor:
    """One number that depends on every output entry differently, so that no gradient cancels."""
    generator = torch.Generator().manual_seed(7)
    return sum((torch.randn(part.shape, generator=generator).to(part) * part).sum() for part in out)  # type: ignore[return-value]


@pytest.mark.parametrize("refine", REFINE)
def test_outputs_and_all_gradients_equal_the_slow_version(refine: str) -> None:
    module = make(refine)
    weights = {k: v.detach().double().requires_grad_() for k, v in module.state_dict().items()}
    tokens = torch.randn(2, 9, 12)
    fast_in, slow_in = tokens.clone().requires_grad_(), tokens.double().requires_grad_()
    out, reference = module(fast_in), slow(weights, slow_in, 3, refine)
    for name, ours, theirs in zip(out._fields, out, reference, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")

    weighted_sum(out).backward()
    weighted_sum(reference).backward()
    assert fast_in.grad is not None and slow_in.grad is not None
    torch.testing.assert_close(fast_in.grad.double(), slow_in.grad, rtol=1e-3, atol=1e-5)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        expected = weights[name].grad
        assert expected is not None and expected.abs().max() > 1e-5, f"{name}: the slow version has no gradient here"
        torch.testing.assert_close(
            parameter.grad.double(), expected, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("dim", "heads"), [(384, 6), (192, 3), (100, 2), (768, 12), (1024, 16), (32, 1), (67, 67)])
def test_heads_are_dim_over_64_or_the_widest_divisor_below(dim: int, heads: int) -> None:
    assert default_heads(dim) == heads
    widest = max(width for width in range(1, 65) if dim % width == 0)
    assert dim // heads == widest


def test_size_for_vit_small_is_four_percent_of_the_backbone() -> None:
    module = PatchGen(dim=384, num_patches=256, refine="linear")
    d, hidden = 384, 96
    by_hand = 3 * d * d + 3 * d + d * d + d + 1 + d * 256 + (d * hidden + hidden) + (hidden * d + d) + d * d + d
    assert sum(p.numel() for p in module.parameters()) == by_hand == 911_713
    assert round(100 * 911_713 / 22_058_112, 1) == 4.1  # DINOv2 ViT-S/14 with registers


def test_start_is_moderate_and_differs_from_patch_to_patch() -> None:
    torch.manual_seed(1)
    module = PatchGen(384, 64)
    mask = module(torch.randn(8, 64, 384)).mask
    assert mask.min() > 0.3 and mask.max() < 0.7
    assert mask.std(1).min() > 0.004  # a far smaller start would give a flat mask
    assert module.log_temperature == 0


@pytest.mark.parametrize(("scale", "spread"), [(0.1, 0.35), (5, 1.0), (500, 0.35)])  # the last saturates the mask
def test_calibration_sets_the_spread_of_the_scores_and_leaves_the_values(scale: float, spread: float) -> None:
    torch.manual_seed(1)
    module, tokens = PatchGen(128, 16, spread=spread), scale * torch.randn(8, 16, 128)
    values = module.qkv.weight[256:].clone()
    module.calibrate(tokens)
    assert module(tokens).mask.logit().std().item() == pytest.approx(spread, rel=1e-3)
    assert torch.equal(module.qkv.weight[256:], values)


def common_tokens(variation: float, seed: int) -> tuple[PatchGen, torch.Tensor]:
    """A module, and tokens that differ by this share of what they have in common."""
    torch.manual_seed(seed)
    module, common = PatchGen(128, 16), torch.randn(128)
    return module, common + variation * (torch.randn(8, 16, 128) + 0.5 * torch.randn(8, 1, 128))


@pytest.mark.parametrize("variation", [0.3, 0.1, 0.03])
def test_calibration_starts_at_a_moderate_mask_whatever_tokens_have_in_common(variation: float) -> None:
    moved = 0
    for seed in range(4):
        module, tokens = common_tokens(variation, seed)
        module.calibrate(tokens)
        mask = module(tokens).mask.detach()
        assert 0.2 <= mask.mean() <= 0.8 and mask.logit().std().item() == pytest.approx(0.35, rel=1e-2)
        if module.qkv.bias.any():
            moved += 1
            assert mask.mean().item() == pytest.approx(0.5, abs=0.02) and not module.qkv.bias[128:].any()
    assert moved  # some seeds start far off, and would stay there without a bias


def test_blank_images_leave_the_start_as_it_is() -> None:
    module, tokens = common_tokens(0.0, 0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.calibrate(tokens)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_given_mask_takes_the_place_of_the_learned_one(dtype: torch.dtype) -> None:
    module, tokens = make(), torch.randn(2, 9, 12)
    nothing, everything = torch.zeros(2, 9).to(dtype), torch.ones(2, 9).to(dtype)
    q, k, v = module._heads(tokens)
    whole = torch.einsum("bpd,dp->bd", module._context(q, k, v), module.rho)
    torch.testing.assert_close(module._aggregate(module._context(q, k, v), everything, module.rho)[0], whole)
    assert torch.equal(module(tokens, mask=nothing).mask, nothing)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(tokens, mask=everything).selected.shape == (2, 12)
    double = module.double()(tokens.double(), mask=everything)
    assert double.selected.dtype == torch.float64


def test_bfloat16_autocast_is_close_to_float32() -> None:
    module, tokens = make("linear", dim=64, patches=16, heads=1), torch.randn(4, 16, 64)
    exact = module(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = module(tokens)
    assert coarse.mask.dtype == torch.float32  # the mask is compared with thresholds: it stays exact
    for ours, theirs in zip(coarse, exact, strict=True):
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < 0.03


# Other patch grids


@pytest.mark.parametrize("grid", [(2, 2), (5, 5), (4, 7)])
def test_resized_aggregator_of_constants_stays_a_mean(grid: tuple[int, int]) -> None:
    """Weights 1/P become 1/P': identical tokens give the same value on any grid."""
    module = PatchGen(12, 9, num_heads=3)
    patches = math.prod(grid)
    torch.testing.assert_close(module.rho_on(grid), torch.full((12, patches), 1 / patches))
    token = torch.randn(1, 1, 12)
    small, large = module(token.expand(1, 9, 12)), module(token.expand(1, patches, 12), grid=grid)
    torch.testing.assert_close(large.selected, small.selected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(large.mask[0, 0], small.mask[0, 0])


def test_resized_aggregator_is_bicubic_times_the_ratio_of_patches() -> None:
    module = make(patches=16, heads=3)
    for j in (0, 5):
        channel = module.rho[j].reshape(1, 1, 4, 4)
        expected = F.interpolate(channel, size=(6, 6), mode="bicubic", align_corners=False).flatten() * 16 / 36
        torch.testing.assert_close(module.rho_on((6, 6))[j], expected)
    assert module(torch.randn(1, 36, 12)).mask.shape == (1, 36)


def test_non_square_layouts_are_named() -> None:
    module = make(patches=6, grid=(2, 3))
    assert module(torch.randn(1, 6, 12)).mask.shape == (1, 6)
    rotated = module(torch.randn(1, 6, 12), grid=(3, 2))  # same P, other layout: resized, not reused
    assert rotated.mask.shape == (1, 6) and module.rho_on((3, 2)) is not module.rho
    with pytest.raises(ValueError, match=r"8 patches form no square grid \(nearest: 4 or 9\); pass grid=\(height, w"):
        module(torch.randn(1, 8, 12))
    assert module(torch.randn(1, 8, 12), grid=(2, 4)).selected.shape == (1, 12)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: PatchGen(12, 10), r"10 patches form no square grid \(nearest: 9 or 16\)"),
    (lambda: PatchGen(12, 9, grid=(2, 4)), r"grid \(2, 4\) has 8 cells, but num_patches is 9"),
    (lambda: PatchGen(12, 9, num_heads=5), "num_heads must divide dim: 12 % 5 != 0; try 1"),
    (lambda: PatchGen(12, 9, refine="conv"), "refine must be one of linear, ln-linear, linear-ln, not 'conv'"),
    (lambda: PatchGen(12, 9, attend="some"), "attend must be one of all, selected, not 'some'"),
    (lambda: PatchGen(12, 9, start="zero"), "start must be one of xavier, contrast, not 'zero'"),
    (lambda: PatchGen(12, 9, rho_start="zero"), "rho_start must be one of mean, conv, not 'zero'"),
    (lambda: square_grid(0), "0 patches form no square grid"),
])  # fmt: skip
def test_impossible_settings_name_the_fix(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# Attention that reads the selection


def test_selected_attention_is_that_of_the_slow_version() -> None:
    module = make(attend="selected").double()
    tokens = torch.randn(2, 9, 12, dtype=torch.float64)
    w = module.state_dict()
    mask = slow(w, tokens, 3, "linear").mask
    plus = torch.stack([_slow_image(w, z, 3, m)[1] for z, m in zip(tokens, mask, strict=True)])
    minus = torch.stack([_slow_image(w, z, 3, 1 - m)[2] for z, m in zip(tokens, mask, strict=True)])
    gate = module.gate(plus)
    out = module(tokens)
    torch.testing.assert_close(out.mask, mask)
    torch.testing.assert_close(out.selected, module.refine(gate * plus))
    torch.testing.assert_close(out.complementary, module.refine(gate * minus))


def test_the_mask_gets_its_gradient_through_attention_and_the_rest_none() -> None:
    module, tokens = make(attend="selected"), torch.randn(2, 9, 12)
    mask = torch.full((2, 9), 0.5, requires_grad=True)
    module(tokens, mask=mask).selected.sum().backward()
    assert mask.grad is not None and mask.grad.abs().sum() > 0
    assert not module._context(*module._heads(tokens), mask.detach()).isnan().any()
    assert not module(tokens).complementary.requires_grad and module(tokens).selected.requires_grad


def test_contrast_starts_with_unlikeness_to_the_mean() -> None:
    torch.manual_seed(0)
    module = PatchGen(64, 36, attend="selected", start="contrast")
    tokens = torch.randn(16, 36, 64) + 2 * torch.randn(16, 1, 64)
    tokens[:, 7] -= 2 * tokens.mean(1)
    module.calibrate(tokens)
    mask = module(tokens).mask
    assert (mask.argmax(1) == 7).float().mean() > 0.9
    assert 0.2 < float(mask.mean()) < 0.8


def test_rho_starts_as_a_mean_or_as_a_convolution() -> None:
    mean, conv = PatchGen(64, 16).rho, PatchGen(64, 16, rho_start="conv").rho
    torch.testing.assert_close(mean, torch.full((64, 16), 1 / 16))
    reference = torch.nn.Conv1d(64, 64, 16, groups=64).weight  # its bound is 1 / sqrt(fan_in), fan_in = 16
    assert conv.abs().max() <= 0.25 and reference.abs().max() <= 0.25
    assert abs(float(conv.detach().std()) - float(reference.detach().std())) < 0.01

"""The bench's own instruments: the naive reference, the byte counter, the arithmetic floor, the ratios."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from patchgen.diagnose import cost
from patchgen.model.patchgen import PatchGen


@pytest.fixture(scope="module")
def tiny_cost() -> dict[str, Any]:
    return cost.measure_step("tiny", image_size=56, batch=2, repeats=2, patches=(16, 64))


def trained_like(dim: int, patches: int) -> PatchGen:
    """A module away from its start, where a flat rho or t = 0 would hide a mistake."""
    torch.manual_seed(0)
    module = PatchGen(dim, patches)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def test_explicit_version_equals_the_module() -> None:
    module, tokens = trained_like(128, 16), torch.randn(3, 16, 128)  # two heads
    with torch.no_grad():
        fused = module(tokens)  # float32: the module sums over the patches in that format whatever its own
        exact = cost.explicit_forward(copy.deepcopy(module).double(), tokens.double())  # the reference in float64
    for fast, slow in zip(fused, exact, strict=True):
        torch.testing.assert_close(fast.double(), slow, rtol=1e-4, atol=1e-4 * float(slow.abs().max()))


def test_explicit_version_has_the_modules_gradients() -> None:
    module, tokens = trained_like(128, 16), torch.randn(2, 16, 128)
    double = copy.deepcopy(module).double()
    for out in (module(tokens), cost.explicit_forward(double, tokens.double())):
        (out.selected.square().mean() + out.complementary.square().mean() + out.mask.square().mean()).backward()
    for (name, fast), slow in zip(module.named_parameters(), double.parameters(), strict=True):
        assert fast.grad is not None and slow.grad is not None, name
        # relative to the tensor's largest entry: the key bias has an almost vanishing gradient of its own
        torch.testing.assert_close(fast.grad.double(), slow.grad, rtol=1e-3, atol=1e-4 * float(slow.grad.abs().max()))


def test_peak_memory_counts_what_is_alive() -> None:
    given = torch.zeros(1000)
    with cost.PeakMemory([given]) as memory:
        first = torch.zeros(100)  # 400 bytes
        view = given[:10].view(2, 5)  # given, so not counted
        second = first + 1  # 800 alive
        del first  # 400 alive
        third = second * 2  # 800
        second.add_(1)  # in place: nothing new
    assert (memory.alive, memory.peak) == (800, 800)
    del second, third, view
    assert memory.alive == 0


def test_peak_memory_sees_what_backward_needs() -> None:
    x = torch.ones(1000, requires_grad=True)
    with cost.PeakMemory([x]) as memory:
        y = x.exp()  # 4,000 bytes, saved for backward
        y.sum().backward()
    assert y.numel() and memory.peak >= 8000  # at least y and the gradient


def test_memory_grows_linearly_and_the_explicit_one_with_the_square() -> None:
    found = cost.measure_memory(dim=8, patches=(64, 256, 1024))
    assert found["exponent"]["patchgen"] == pytest.approx(1, abs=0.1)
    assert found["exponent"]["explicit"] == pytest.approx(2, abs=0.1)
    explicit = [row["explicit"] for row in found["bytes"]]
    assert explicit[-1] > 4 * 1024**2 * 2  # scores and their softmax, float32, one head
    assert found["of_explicit_at_largest"] == found["bytes"][-1]["patchgen"] / explicit[-1] < cost.MEMORY_TARGET


def test_bytes_are_the_same_twice() -> None:
    forward = cost.FORWARDS["patchgen"]
    assert cost.peak_bytes(forward, 16, 64) == cost.peak_bytes(forward, 16, 64)


def test_flops_by_hand(tiny_cost: dict[str, Any]) -> None:
    """tiny: D = 64, 2 blocks, 16 patches + 5 prefix tokens, 1 head; the module sees the 16 patches."""
    dim, patches, tokens, classes = 64, 16, 21, cost.NUM_CLASSES
    linear = 2 * tokens * (4 * dim * dim + 2 * dim * 4 * dim)  # qkv, out and the two MLP layers of a block
    products = 2 * 2 * tokens * tokens * dim  # scores and values
    embed = 2 * patches * 3 * 14 * 14 * dim  # frozen, and nothing before it learns: forward only
    head = 3 * 2 * dim * classes  # forward, input and weight gradient
    baseline = embed + 2 * (2 * linear + 3 * products) + head
    assert tiny_cost["methods"]["lp-ln"]["gflops_per_image"] == pytest.approx(baseline / 1e9, rel=1e-6)

    over_patches = 3 * 2 * patches * 4 * dim * dim + 3 * 2 * 2 * patches * patches * dim
    added = (tiny_cost["methods"]["patchgen"]["gflops_per_image"]) * 1e9 - baseline
    assert over_patches < added < 1.2 * over_patches  # the rest: gate and refinement, on one vector an image
    assert tiny_cost["ratio"]["floor"] == pytest.approx(1 + added / baseline) and tiny_cost["ratio"]["floor"] > 1


def test_parameters(tiny_cost: dict[str, Any]) -> None:
    methods, module = tiny_cost["methods"], tiny_cost["module"]
    added = methods["patchgen"]["trainable_parameters"] - methods["lp-ln"]["trainable_parameters"]
    assert module["parameters"] == added == sum(p.numel() for p in PatchGen(64, 16).parameters())
    assert module["of_backbone"] == added / tiny_cost["backbone"]["parameters"]
    norms = 2 * 2 * 2 * 64 + 2 * 64  # two in each of two blocks and a final one, weight and bias
    assert methods["lp-ln"]["trainable_parameters"] == norms + 64 * cost.NUM_CLASSES + cost.NUM_CLASSES


def test_structure(tiny_cost: dict[str, Any]) -> None:
    assert json.loads(json.dumps(tiny_cost)) == tiny_cost
    assert tiny_cost["patches"] == 16 and list(tiny_cost["methods"]) == ["lp-ln", "patchgen"]
    assert all(len(m["seconds"]) == 2 and min(m["seconds"]) > 0 for m in tiny_cost["methods"].values())
    assert [row["patches"] for row in tiny_cost["memory"]["bytes"]] == [16, 64]


def test_compare_by_hand() -> None:
    series = cost.Times([2.0, 3.0, 10.0], [4.0, 4.0, 9.0]), cost.Times([1.0, 2.0, 4.0], [2.0, 2.0, 1.0])
    found = cost.compare(*series)  # pairs 2, 1.5, 2.5
    assert found["of_medians"] == 1.5 and found["of_fastest"] == 2 and found["of_cpu_medians"] == 2
    assert (found["lower_quartile"], found["upper_quartile"]) == (1.75, 2.25) and not found["conclusive"]
    steady = cost.compare(cost.Times([1.05] * 3, [1.0] * 3), cost.Times([1.0] * 3, [1.0] * 3))
    assert steady["conclusive"] and steady["of_medians"] == pytest.approx(1.05)


def test_a_step_trains_module_head_and_norms_alone() -> None:
    backbone = cost.load_backbone("tiny")
    rival = cost._rival("patchgen", backbone, 56)
    before = {name: p.detach().clone() for name, p in rival.model.named_parameters()}
    rival.step(cost._random_batch(3, 56))
    moved = {name for name, p in rival.model.named_parameters() if not torch.equal(p, before[name])}
    learning = {name for name, p in rival.model.named_parameters() if p.requires_grad}
    assert moved <= learning and {name.split(".")[0] for name in moved} == {"backbone", "select", "head"}
    assert all("norm" in name for name in moved if name.startswith("backbone"))


def test_the_rivals_take_turns() -> None:
    lines: list[str] = []
    cost.measure_step("tiny", image_size=28, batch=1, repeats=1, patches=(4, 16), report=lines.append)
    assert [line.split()[0] for line in lines] == ["lp-ln", "patchgen"] * 2 + ["patchgen", "explicit"] * 2
    assert len(lines) == cost.pieces(1, (4, 16)) and "warm-up" in lines[1] and "warm-up" not in lines[2]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"repeats": 0}, {"image_size": 57}, {"source": "dinov2-smal"}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|multiples of the patch size|did you mean 'dinov2-small'"):
        cost.measure_step(**{"source": "tiny", "image_size": 56, **wrong})

"""Memory over the patches: the naive reference is the module, and bytes grow as they should."""

import copy

import pytest
import torch

from benchmarks import memory
from patchgen.model.patchgen import PatchGen


def trained_like(dim: int, patches: int) -> PatchGen:
    """A module away from its start, where a flat rho or t = 0 would hide a mistake."""
    torch.manual_seed(0)
    module = PatchGen(dim, patches)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def test_explicit_version_has_the_modules_gradients() -> None:
    module, tokens = trained_like(128, 16), torch.randn(2, 16, 128)
    double = copy.deepcopy(module).double()
    for out in (module(tokens), memory.explicit_forward(double, tokens.double())):
        (out.selected.square().mean() + out.complementary.square().mean() + out.mask.square().mean()).backward()
    for (name, fast), slow in zip(module.named_parameters(), double.parameters(), strict=True):
        assert fast.grad is not None and slow.grad is not None, name
        # relative to the tensor's largest entry: the key bias has an almost vanishing gradient of its own
        torch.testing.assert_close(fast.grad.double(), slow.grad, rtol=1e-3, atol=1e-4 * float(slow.grad.abs().max()))


def test_memory_grows_linearly_and_the_explicit_one_with_the_square() -> None:
    found = memory.measure(dim=8, patches=(64, 256, 1024))
    assert found["exponent"]["patchgen"] == pytest.approx(1, abs=0.1)
    assert found["exponent"]["explicit"] == pytest.approx(2, abs=0.1)
    explicit = [row["explicit"] for row in found["bytes"]]
    assert explicit[-1] > 4 * 1024**2 * 2  # scores and their softmax, float32, one head
    assert found["bytes"][-1]["patchgen"] / explicit[-1] < memory.TARGET
    *_, largest, _ = memory.lines(found)
    assert largest[0].startswith("module at P = 1,024") and largest[2:] == ("<= 0.1", True)

"""Kronecker updates against torch.kron, the published numbers of parameters, and the router by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.methods.kadaptation import RANKS, KroneckerUpdate, Mixture, Rules, imbalance
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import trained_tensors
from patchgen.model.tuning import attention_layers

BOTH = ("kadaptation", "kadaptation-moa")


def update(rank: int = 2, d_in: int = 8, d_out: int = 12, size: int = 4) -> KroneckerUpdate:
    torch.manual_seed(0)
    return KroneckerUpdate(Rules(size), d_in, d_out, rank, bias=True).eval()


def by_kron(adapter: KroneckerUpdate) -> Tensor:
    """H as it is written: the sum of t whole Kronecker products."""
    a, b, u, v = adapter.rules.left, adapter.rules.right, adapter.left, adapter.right
    return torch.stack([torch.kron(torch.outer(a[i], b[i]), u[i] @ v[i]) for i in range(len(a))]).sum(0)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_factors_are_the_kronecker_products(rank: int) -> None:
    adapter, x = update(rank), torch.randn(3, 5, 8)
    nn.init.normal_(adapter.bias)  # type: ignore[arg-type]
    torch.testing.assert_close(adapter(x), x @ by_kron(adapter) + adapter.bias)


def test_half_of_the_elements_are_dropped_in_a_training_pass_alone() -> None:
    adapter = update().train()
    with torch.no_grad():
        whole = adapter(torch.eye(8))  # H itself
    dropped = adapter(torch.eye(8)).detach()  # what was dropped is 0 and the rest doubled
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])


@pytest.mark.parametrize(("method", "count"), [("kadaptation", 143_360), ("kadaptation-moa", 1_494_022 - 2 * 64 * 64)])
def test_the_published_numbers_of_parameters(method: str, count: int) -> None:
    """The release's mixture has a second pair of rules that nothing uses."""
    config = Config("photos", "site_c", method=method, backbone="clip-b16", image_size=32)
    with torch.device("meta"):
        model = build_on(load_backbone("clip-b16", pretrained=False), config, make_method(config), 7)
    trained = trained_tensors(model)
    assert sum(t.numel() for name, t in trained.items() if not name.startswith("head.")) == count
    assert all(name.startswith(("head.", "backbone.adapters.")) for name in trained)


@pytest.mark.parametrize("method", BOTH)
@torch.no_grad()
def test_without_b_the_network_is_unchanged_and_evaluation_is_deterministic(
    method: str, scene: Callable[..., Any]
) -> None:
    s, plain = scene(method, hparams={"rules": 16}), load_backbone("tiny")
    backbone, image = s.model.eval().backbone, s.batch.image
    assert backbone.digest() == plain.digest()  # what stands beside the network is no part of it
    found = backbone(image).cls
    assert torch.equal(found, s.model.train().backbone(image).cls)
    assert not torch.equal(found, plain(image).cls)
    for part in backbone.adapters.modules():
        if isinstance(part, KroneckerUpdate):
            part.left.zero_()
    torch.testing.assert_close(backbone(image).cls, plain(image).cls)


@torch.no_grad()
def test_the_update_folds_into_the_layer(scene: Callable[..., Any]) -> None:
    s, plain = scene("kadaptation", hparams={"rules": 16}), load_backbone("tiny")
    for tensor in s.model.backbone.adapters.parameters():
        nn.init.normal_(tensor, std=0.3)
    layers = [layer for block in attention_layers(plain) for layer in (*block.inputs, block.out)]
    for adapter, layer in zip(s.model.backbone.adapters, layers, strict=True):
        layer.weight += by_kron(adapter).T
        layer.bias += adapter.bias
    found, wanted = (backbone(s.batch.image).cls for backbone in (s.model.backbone, plain))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


# The mixture


def mixture() -> Mixture:
    torch.manual_seed(0)
    rules = Rules(4)
    found = Mixture(rules, 8, 12).eval()
    for tensor in (rules.left, rules.right, found.directions, found.bias):
        nn.init.normal_(tensor)
    return found


@torch.no_grad()
def test_each_token_passes_its_best_expert_times_its_probability() -> None:
    mix, x = mixture(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    wanted, chosen = torch.empty(2, 5, 12), set()
    for b in range(2):
        for t in range(5):
            u = mix.project(x[b, t])
            cosines = [float(u @ d / (u.norm() * d.norm())) for d in mix.directions.T]
            p = torch.tensor(cosines).mul(2.0).softmax(0)  # the scale starts at 2
            best = int(p.argmax())
            chosen.add(best)
            wanted[b, t] = p[best] * (x[b, t] @ by_kron(mix.experts[best])) + mix.bias  # type: ignore[arg-type]
    assert len(chosen) > 1
    torch.testing.assert_close(mix(x), wanted)


def test_a_training_pass_routes_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise and dropout both ways of computing agree, in values and in gradients."""
    monkeypatch.setattr("patchgen.methods.kadaptation._drops", lambda module: module is mix)
    mix, x = mixture(), torch.randn(12, 8)
    monkeypatch.setattr("patchgen.methods.kadaptation.torch.randn_like", torch.zeros_like)
    own = mix(x)
    monkeypatch.setattr("patchgen.methods.kadaptation._drops", lambda module: False)
    whole = mix(x)
    torch.testing.assert_close(own, whole)
    grads = [torch.autograd.grad(y.square().sum(), mix.experts.parameters()) for y in (own, whole)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_imbalance_by_hand() -> None:
    shares = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]])
    best = torch.tensor([0.8, 0.35])

    def cv2(values: list[float]) -> float:
        mean = sum(values) / 4
        return sum((v - mean) ** 2 for v in values) / 3 / mean**2

    importance = [sum(row) for row in zip(*shares.tolist(), strict=True)]
    phi = [[0.5 * (1 + math.erf(4 * (p - b) / math.sqrt(2))) for p in row]
           for row, b in zip(shares.tolist(), best.tolist(), strict=True)]  # fmt: skip
    load = [sum(row) for row in zip(*phi, strict=True)]
    assert float(imbalance(shares, best)) == pytest.approx((cv2(importance) + cv2(load)) / 2, rel=1e-5)
    assert float(imbalance(torch.full((3, 4), 0.25), torch.full((3,), 0.25))) == pytest.approx(0, abs=1e-6)


def test_the_loss_has_the_layers_imbalance(scene: Callable[..., Any]) -> None:
    s = scene("kadaptation-moa", hparams={"rules": 16, "balance": 1.0})
    out = s.forward()
    mixtures: Any = s.model.backbone.adapters
    wanted = sum(float(m.imbalance.detach()) for m in mixtures)
    assert len(mixtures) == 1 and len(mixtures[0].experts) == len(RANKS)
    assert float(s.method.losses(out, s.batch)["L_balance"].detach()) == pytest.approx(wanted, rel=1e-5)

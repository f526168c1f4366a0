"""MIRO against a second copy of the backbone; GMDG's terms against the pseudo-inverse, autograd and loops."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.miro import Miro, explained_covariance, mean_of_domains, moment_distance, tap_modules
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier
from patchgen.model.convert import Loaded, build
from patchgen.model.generic import FAMILIES
from patchgen.model.tuning import set_tuning

VIT = {"hidden_size": 64, "num_attention_heads": 1, "patch_size": 4, "image_size": 16}
CONV = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 24], "depths": [1, 1, 1, 1]}


def backbone_of(family: str, depth: int = 2) -> Backbone:
    more: dict[str, Any] = {"groups_width": 8} if family == "regnet" else {}
    if family in ("vit", "vit_mae", "clip_vision_model"):
        more = {"intermediate_size": 128}
    shape = CONV if FAMILIES[family].convolutional else VIT | {"num_hidden_layers": depth}
    torch.manual_seed(3)
    return Backbone(Loaded(build(family, {**shape, **more})), "small", "small")


@pytest.mark.parametrize(("depth", "wanted"), [(24, [5, 11, 17, 23]), (12, [2, 5, 8, 11]), (2, [0, 1]), (1, [0])])
def test_taps_are_the_stem_and_evenly_spaced_blocks(depth: int, wanted: list[int]) -> None:
    backbone = backbone_of("dinov2", depth)
    stem, *blocks = tap_modules(backbone)
    assert stem is backbone.model.embeddings.patch_embeddings.projection
    assert blocks == [backbone.model.encoder.layer[i] for i in wanted]


def by_hand(now: Backbone, then: Backbone, images: Tensor, variances: list[Tensor]) -> float:
    """sum_l 1/2 mean[(z - z0)^2 / v + log v] with a second backbone, channel by channel."""
    said: list[list[Tensor]] = [[], []]
    for backbone, outputs in zip((now, then), said, strict=True):
        handles = [m.register_forward_hook(lambda m, i, o, w=outputs: w.append(o)) for m in tap_modules(backbone)]
        with torch.no_grad():
            backbone(images)
        for handle in handles:
            handle.remove()
    taps = [pair for pair in zip(*said, strict=True)][-len(variances) :]
    total = 0.0
    for (z, z0), variance in zip(taps, variances, strict=True):
        channel = 1 if z.ndim == 4 else -1
        z, z0 = (t.movedim(channel, 0).flatten(1).double() for t in (z, z0))
        parts = [((a - b) ** 2 / v + math.log(v)).mean() for a, b, v in zip(z, z0, variance.tolist(), strict=True)]
        total += float(torch.stack(parts).mean()) / 2
    return total


@pytest.mark.parametrize("tune", ["layernorm", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_term_is_that_of_two_copies(family: str, tune: Any) -> None:
    settings = Config(data="photos", unseen="site_c", method="miro", tune=tune, hparams={"miro": 0.3})
    method, backbone = make_method(settings), backbone_of(family)
    set_tuning(backbone, tune)
    then = copy.deepcopy(backbone)
    size = 32 if FAMILIES[family].convolutional else 16
    model = Classifier(backbone, 3, image_size=size, pool="cls")
    method.setup(model)
    with torch.no_grad():
        for parameter in [*backbone.parameters(), *method.parameters()]:
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    images = torch.randn(4, 3, size, size)
    kept = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    found = method.losses(model(images), Batch(images, *(torch.arange(4) % 3 for _ in range(3))))
    assert isinstance(method, Miro) and list(found) == ["main", "L_miro"]
    variances = [variance().detach() for variance in method.variances]
    stem, *rest = tap_modules(backbone)  # a stem without a norm (ViT, ConvNeXt) cannot drift where only norms learn
    assert len(variances) == len(rest) + (tune == "full" or not isinstance(stem, nn.Conv2d))
    wanted = 0.3 * by_hand(backbone, then, images, variances)
    assert float(found["L_miro"].detach()) == pytest.approx(wanted, rel=1e-4)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in backbone.state_dict().items())


def test_only_training_passes_are_kept_and_only_until_they_are_used(scene: Callable[..., Any]) -> None:
    s = scene("miro")
    with torch.no_grad():
        s.forward()
    assert not s.method._taps._seen
    out = s.forward()
    s.move()  # in place, after the pass: an evaluation now must not take the place of what was seen
    with torch.no_grad():
        s.model(torch.zeros_like(s.batch.image))
    loss = s.method.losses(out, s.batch)["L_miro"].detach()
    assert float(loss) == pytest.approx(0.1 * math.log(0.1), rel=1e-4)
    assert not s.method._taps._seen


@pytest.mark.parametrize("settings", [{"method": "miro", "precision": "bf16-mixed"}, {"method": "patchgen+miro"}])
def test_a_run(settings: dict[str, Any], tiny_run: Callable[..., Any]) -> None:
    first, *_, last = tiny_run(**settings, steps=3).records("evaluation")
    # at step 0 both passes are equal to the last digit, in half precision too
    assert first["train"]["L_miro"] == pytest.approx(0.1 * math.log(0.1), rel=1e-5)
    assert last["train"]["L_miro"] != first["train"]["L_miro"]


# GMDG


def naive_penalty(features: Tensor, labels: Tensor) -> Tensor:
    """As it is written, with the D x D pseudo-inverse."""
    x, y = features / features.norm(), labels / labels.norm()
    x, y = x - x.mean(0), y - y.mean(0)
    n = len(x)
    explained = (x.T @ y / n) @ torch.linalg.pinv(y.T @ y / n) @ (y.T @ x / n)
    return explained.square().mean()


def random_pair(samples: int, dim: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(samples + dim)
    x, y = (torch.randn(samples, dim, generator=g, dtype=torch.float64) for _ in range(2))
    if rank is not None:
        y = torch.randn(samples, rank, generator=g, dtype=torch.float64) @ y[:rank]
    return x, y


@pytest.mark.parametrize(
    ("samples", "dim", "rank"), [(6, 20, None), (20, 6, None), (8, 8, None), (12, 30, 3), (30, 12, 2)]
)
def test_the_penalty_is_that_of_the_pseudo_inverse(samples: int, dim: int, rank: int | None) -> None:
    x, y = random_pair(samples, dim, rank)
    slopes = []
    for penalty in (explained_covariance, naive_penalty):
        leaf = x.clone().requires_grad_()
        value = penalty(leaf, y)
        slopes.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("domain", [(3, 3, 0, 0), (3, 3, 3, 0), (1, 1, 1, 1)])
def test_domains_count_alike_whatever_their_size(domain: tuple[int, ...]) -> None:
    values = torch.randn(4, 3)
    means = [torch.stack([v for v, d in zip(values, domain, strict=True) if d == k]).mean(0) for k in set(domain)]
    torch.testing.assert_close(mean_of_domains(values, torch.tensor(domain)), torch.stack(means).mean(0))


def terms(s: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)  # of the embedding's dropout
    found: dict[str, Tensor] = s.method.losses(s.forward(), s.batch)
    return found


@pytest.mark.parametrize("name", ["gmdg", "patchgen+gmdg"])
def test_terms_by_hand(name: str, scene: Callable[..., Any]) -> None:
    weights = {"miro": 0.3, "shift": 0.2, "domain": 0.5}
    s = scene(name, hparams=weights)
    s.move()
    found, out = terms(s), s.forward()
    assert [term for term in found if term.startswith("L_")][-4:] == ["L_miro", "L_label", "L_shift", "L_domain"]
    target = torch.where(s.batch.label < 0, out.logits.argmax(1), s.batch.label)
    torch.manual_seed(7)
    y, labelled = s.method.embedding(target), s.batch.label >= 0
    label_loss = F.cross_entropy(s.model.head(y)[labelled], s.batch.label[labelled])
    torch.testing.assert_close(found["L_label"], label_loss)

    main = F.cross_entropy(out.logits[labelled], s.batch.label[labelled])
    (steep,) = torch.autograd.grad(main, out.features, retain_graph=True)
    naive = naive_penalty(out.features.double(), y.detach().double())
    (flat,) = torch.autograd.grad(naive, out.features, retain_graph=True)
    wanted = 0.2 * naive * steep.abs().max() / flat.abs().max()
    torch.testing.assert_close(found["L_shift"].detach().double(), wanted.detach(), rtol=1e-3, atol=0)

    pair = torch.cat([out.features, y], 1).detach().double()
    center = (pair[:3].mean(0) + pair[3:].mean(0)) / 2
    parts = [((row - center) ** 2 / 0.1 + math.log(0.1)).mean() / 2 for row in pair]
    assert float(found["L_domain"].detach()) == pytest.approx(0.5 * float(torch.stack(parts).mean()), rel=1e-4)


def test_weights_of_zero_cost_nothing(scene: Callable[..., Any]) -> None:
    s = scene("gmdg", hparams={"shift": 0.0, "domain": 0.0})
    assert list(terms(s)) == ["main", "L_miro"]
    assert {name for name, _ in s.method.named_parameters()} == {"variances.0.bias", "variances.1.bias"}
    s = scene("gmdg", tune="head", hparams={"miro": 0.0, "domain": 0.0})
    assert list(terms(s)) == ["main", "L_label", "L_shift"]


def test_the_domain_term_moves_nothing_but_its_variance(scene: Callable[..., Any]) -> None:
    """m is the mean of the very c that the term compares with it: no pull is left, only rounding."""
    s = scene("gmdg")
    s.move()
    strongest = []
    for term in ("L_domain", "L_shift"):
        own = s.reached(terms(s)[term])[1]
        assert own == ({"variance.bias"} if term == "L_domain" else set())
        trained = [p.grad for p in s.model.backbone.parameters() if p.grad is not None]
        strongest.append(max(float(gradient.abs().max()) for gradient in trained))
    assert strongest[0] < 1e-5 * strongest[1]


# Without labels


def test_it_is_the_distance_of_the_matrices() -> None:
    x, domain = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 2, 2, 2, 5, 5])
    unit = x / x.norm()
    moments = [unit[domain == e].T @ unit[domain == e] / int((domain == e).sum()) for e in (0, 2, 5)]
    mean = sum(moments) / 3
    wanted = sum(float(((c - mean) ** 2).mean()) for c in moments) / 3
    assert float(moment_distance(x, domain)) == pytest.approx(wanted, rel=1e-4)


def test_the_term_is_as_steep_as_the_cross_entropy(scene: Callable[..., Any]) -> None:
    s = scene("domain-moments", sources=(0, 2), hparams={"moments": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    main, term = (
        torch.autograd.grad(found[name], out.features, retain_graph=True)[0] for name in ("main", "L_moments")
    )
    assert float(term.abs().max()) == pytest.approx(0.5 * float(main.abs().max()), rel=1e-4)


def test_the_gaussian_trains_its_variance_alone(scene: Callable[..., Any]) -> None:
    s = scene("domain-gaussian", sources=(0, 2))
    out = s.forward()
    term = s.method.losses(out, s.batch)["L_gaussian"]
    (slope,) = torch.autograd.grad(term, out.features, retain_graph=True)
    assert float(slope.abs().max()) < 1e-6
    assert s.reached(term)[1] == {"spread.bias"}
    x = out.features.detach()
    m = (x[:3].mean(0) + x[3:].mean(0)) / 2
    v = 0.1
    wanted = 0.1 * float(((x - m) ** 2 / v).mean() + torch.tensor(v).log()) / 2
    assert float(term.detach()) == pytest.approx(wanted, rel=1e-4)

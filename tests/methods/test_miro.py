"""MIRO: the drift of each tap against a second copy of the backbone, and passes that are told apart."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.miro import Miro, tap_modules
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier
from patchgen.model.convert import FAMILIES, Loaded, build
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


def test_without_weight_there_is_no_second_pass(scene: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    s = scene("lp+miro", hparams={"miro": 0.0})
    monkeypatch.setattr("patchgen.methods.miro.functional_call", None)
    assert list(s.method.losses(s.forward(), s.batch)) == ["main"] and not list(s.method.parameters())


@pytest.mark.parametrize("settings", [{"method": "miro", "precision": "bf16-mixed"}, {"method": "patchgen+miro"}])
def test_a_run(settings: dict[str, Any], tiny_run: Callable[..., Any]) -> None:
    first, *_, last = tiny_run(**settings, steps=3).records("evaluation")
    # at step 0 both passes are equal to the last digit, in half precision too
    assert first["train"]["L_miro"] == pytest.approx(0.1 * math.log(0.1), rel=1e-5)
    assert last["train"]["L_miro"] != first["train"]["L_miro"]

"""ARM: who supports whom, where the context is read, and a model that predicts with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import Method, make_method
from patchgen.methods.arm import Context, MapContext, VectorContext
from patchgen.methods.build import build_on
from patchgen.model.backbone import Backbone, Origin, load_backbone
from patchgen.model.classifier import Classifier, trained_tensors
from patchgen.model.convert import Loaded, build
from patchgen.predict.predictor import Prediction, load_run
from patchgen.train.loop import plain_step

CONV = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
DOMAIN = torch.tensor([4, 1, 1, 4, 4])  # groups in no order


def backbone_of(kind: str) -> Backbone:
    if kind == "tiny":
        return load_backbone("tiny")
    torch.manual_seed(3)
    return Backbone(Loaded(build("resnet", CONV)), Origin("small", "small"))


def made(kind: str, method: str = "arm", **changes: Any) -> tuple[Method, Classifier, Batch]:
    size = 28 if kind == "tiny" else 64
    config = Config("photos", "site_c", image_size=size, method=method, **changes)
    chosen = make_method(config)
    model = build_on(backbone_of(kind), config, chosen, 3)
    chosen.setup(model)
    images = torch.randn(5, 3, size, size, generator=torch.Generator().manual_seed(1))
    return chosen, model, Batch(images, torch.tensor([0, 1, 2, 0, 1]), DOMAIN, torch.arange(5))


def speak_up(model: Classifier) -> Context:
    """Let the context have an effect, as it has behind some steps."""
    context: Any = model.backbone.context
    with torch.no_grad():
        context.into.weight.copy_(torch.randn(context.into.weight.shape, generator=torch.Generator().manual_seed(2)))
    return context


def test_an_image_gets_the_mean_of_its_support() -> None:
    said = torch.tensor([[1.0], [10.0], [20.0], [2.0], [6.0]])
    context = Context()
    assert context.average(said).flatten().tolist() == pytest.approx([7.8] * 5)
    context.groups = [torch.tensor([1, 2]), torch.tensor([0, 3, 4])]
    assert context.average(said).flatten().tolist() == [3.0, 15.0, 15.0, 3.0, 3.0]


@pytest.mark.parametrize(("kind", "context"), [("tiny", VectorContext), ("resnet", MapContext)])
def test_the_first_step_starts_from_the_pretrained_network(kind: str, context: type) -> None:
    _, plain, batch = made(kind, "lp-ln")
    _, model, _ = made(kind)
    assert isinstance(model.backbone.context, context)
    torch.testing.assert_close(model.read(batch.image), plain.read(batch.image))
    speak_up(model)
    assert not torch.allclose(model.read(batch.image), plain.read(batch.image), atol=1e-3)


def test_the_map_is_added_to_the_image() -> None:
    _, plain, batch = made("resnet", "lp-ln")
    _, model, _ = made("resnet")
    context: Any = speak_up(model)
    said = context.look(batch.image).mean(0)  # (1, H, W): the whole batch is the support
    changed = batch.image + context.into.weight.view(3, 1, 1) * said
    torch.testing.assert_close(model.read(batch.image), plain.read(changed), atol=1e-5, rtol=1e-4)


def test_the_vector_is_added_to_every_patch_embedding() -> None:
    _, model, batch = made("tiny")
    context: Any = speak_up(model)
    stem = next(module for module in model.backbone.model.modules() if isinstance(module, nn.Conv2d))
    found = stem(batch.image)
    plain = nn.functional.conv2d(batch.image, stem.weight, stem.bias, stride=stem.stride)
    vector = context.into(context.look(batch.image).mean((0, 2, 3)))  # (D,)
    torch.testing.assert_close(found, plain + vector.view(1, -1, 1, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tiny", "resnet"])
def test_a_single_image_is_its_own_support_and_others_change_it(kind: str) -> None:
    _, model, batch = made(kind)
    context = speak_up(model)
    alone = torch.cat([model(image[None]).logits for image in batch.image])
    assert not torch.allclose(model(batch.image).logits, alone, atol=1e-3)
    context.groups = [torch.tensor([i]) for i in range(5)]
    torch.testing.assert_close(model(batch.image).logits, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["arm", "full+arm"])
def test_a_step_tells_the_domains(name: str) -> None:
    method, model, batch = made("tiny", name)
    context = speak_up(model)
    seen: list[Tensor] = []
    losses = method.losses
    method.losses = lambda out, batch: (seen.append(out.logits), losses(out, batch))[1]  # type: ignore[method-assign]
    by_domain = {}
    for domain in (1, 4):
        rows = torch.nonzero(domain == DOMAIN).squeeze(1)
        by_domain |= dict(zip(rows.tolist(), model(batch.image[rows]).logits.detach(), strict=True))
    optimizer = torch.optim.Adam(trained_tensors(model).values())
    plain_step(method, model, optimizer, batch)
    expected = torch.stack([by_domain[i] for i in range(5)])
    torch.testing.assert_close(seen[0].detach(), expected, atol=1e-5, rtol=1e-4)
    assert context.groups is None


@pytest.mark.parametrize("tune", ["head", "layernorm"])
def test_gradients_reach_the_context_in_every_tuning_mode(tune: str, scene: Callable[..., Any]) -> None:
    s = scene("arm", tune=tune)
    assert not s.model.backbone.frozen  # so that no features are kept
    learn = set(trained_tensors(s.model))
    look = {f"backbone.context.look.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert look < learn and "backbone.context.into.weight" in learn
    first = s.reached(s.method.losses(s.forward(), s.batch)["main"])
    assert first == (learn - look, set())  # nothing passes a map of zeros but its own gradient
    s.move()
    assert s.reached(s.method.losses(s.forward(), s.batch)["main"]) == (learn, set())


def test_the_digest_is_that_of_the_pretrained_model() -> None:
    _, model, _ = made("tiny")
    assert model.backbone.digest() == load_backbone("tiny").digest()


@pytest.mark.parametrize("name", ["arm", "patchgen+arm"])
def test_predictions_use_the_context(name: str, tiny_run: Callable[..., Any], image_folder: Path) -> None:
    predictor = load_run(tiny_run(name, lr=0.05).path)
    assert predictor.model.backbone.context.into.weight.any()
    paths = sorted(image_folder.rglob("studio/*/0*.png"))[::5]
    together, alone = (list(predictor.predict(paths, batch=size)) for size in (len(paths), 1))
    assert all(isinstance(found, Prediction) for found in together)
    moved = [abs(a.probabilities - b.probabilities).max() for a, b in zip(together, alone, strict=True)]  # type: ignore[union-attr]
    assert max(moved) > 1e-6

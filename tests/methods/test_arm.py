"""ARM: who supports whom, where the context is read, and gradients that reach it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from patchgen.model.classifier import trained_tensors

Scenes = Callable[..., Any]


def speak_up(s: Any) -> Any:
    """The context, with an effect, as it has after some steps."""
    context = s.model.backbone.context
    with torch.no_grad():
        context.into.weight.copy_(torch.randn(context.into.weight.shape, generator=torch.Generator().manual_seed(2)))
    return context


@pytest.fixture(params=["scene", "resnet_scene"])
def either(request: pytest.FixtureRequest) -> Scenes:
    """With a vector as context (a ViT), and with a map."""
    made: Scenes = request.getfixturevalue(request.param)
    return made


def test_the_first_step_starts_from_the_pretrained_network(either: Scenes) -> None:
    plain, s = either("lp-ln"), either("arm")
    torch.testing.assert_close(s.model.read(s.batch.image), plain.model.read(s.batch.image))
    assert s.model.backbone.digest() == plain.model.backbone.digest()
    speak_up(s)
    assert not torch.allclose(s.model.read(s.batch.image), plain.model.read(s.batch.image), atol=1e-3)


def test_the_map_is_added_to_the_image(resnet_scene: Scenes) -> None:
    plain, s = resnet_scene("lp-ln"), resnet_scene("arm")
    context, image = speak_up(s), s.batch.image
    said = context.look(image).mean(0)  # (1, H, W): the whole batch is the support
    changed = image + context.into.weight.view(3, 1, 1) * said
    torch.testing.assert_close(s.model.read(image), plain.model.read(changed), atol=1e-5, rtol=1e-4)


def test_the_vector_is_added_to_every_patch_embedding(scene: Scenes) -> None:
    s = scene("arm")
    context, image = speak_up(s), s.batch.image
    stem = next(module for module in s.model.backbone.model.modules() if isinstance(module, nn.Conv2d))
    plain = nn.functional.conv2d(image, stem.weight, stem.bias, stride=stem.stride)
    vector = context.into(context.look(image).mean((0, 2, 3)))  # (D,)
    torch.testing.assert_close(stem(image), plain + vector.view(1, -1, 1, 1), atol=1e-5, rtol=1e-5)


def test_a_single_image_is_its_own_support_and_others_change_it(either: Scenes) -> None:
    s = either("arm")
    context = speak_up(s)
    alone = torch.cat([s.model(image[None]).logits for image in s.batch.image])
    assert not torch.allclose(s.forward().logits, alone, atol=1e-3)
    context.groups = [torch.tensor([i]) for i in range(6)]
    torch.testing.assert_close(s.forward().logits, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["arm", "full+arm"])
def test_a_step_tells_the_domains(name: str, scene: Scenes) -> None:
    s = scene(name)
    context = speak_up(s)
    s.batch.domain[:] = torch.tensor([4, 1, 1, 4, 4, 1])  # in no order
    expected = torch.empty(6, 3)
    for rows in ([1, 2, 5], [0, 3, 4]):
        expected[rows] = s.model(s.batch.image[rows]).logits.detach()
    found = s.method.forward(s.model, s.batch).logits
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-4)
    assert context.groups is None


@pytest.mark.parametrize("tune", ["head", "layernorm"])
def test_gradients_reach_the_context_in_every_tuning_mode(tune: str, scene: Scenes) -> None:
    s = scene("arm", tune=tune)
    assert not s.model.backbone.frozen  # so that no features are kept
    learn = set(trained_tensors(s.model))
    look = {f"backbone.context.look.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert look < learn and "backbone.context.into.weight" in learn
    first = s.reached(s.method.losses(s.forward(), s.batch)["main"])
    assert first == (learn - look, set())  # nothing passes a map of zeros but its own gradient
    s.move()
    assert s.reached(s.method.losses(s.forward(), s.batch)["main"]) == (learn, set())

"""MTL and RSC in their long form; MixStyle and SagNet: their places, and passes that they leave alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.build import build_model, load_trained
from patchgen.methods.features import kept_features, mix_deviations, mix_variances, swap_content
from patchgen.model.backbone import Backbone
from patchgen.model.convert import Loaded
from patchgen.model.generic import build_generic
from patchgen.model.losses import cross_entropy, pseudo_labels

# MTL


def long_form(s: Any, features: Tensor, embedding: Tensor) -> Tensor:
    """Logits of the head W on [x, e] (B, 2 D)."""
    wide = torch.cat([s.model.head.weight, s.method.shift.weight], 1)  # (C, 2 D)
    return torch.cat([features, embedding], 1) @ wide.T + s.model.head.bias


def test_embeddings_are_moving_averages(scene: Callable[..., Any]) -> None:
    s = scene("mtl", sources=(0, 2), hparams={"ema": 0.8})
    assert not s.method.embeddings().any()
    means = []
    for step in range(3):
        out = s.forward()
        s.method.losses(out, s.batch)
        means.append(torch.stack([out.features[:3].mean(0), out.features[3:].mean(0)]).detach())
        weights = [0.2 * 0.8 ** (step - i) for i in range(step + 1)]
        wanted = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
        torch.testing.assert_close(s.method.embeddings(), wanted)
        s.move()
    assert not torch.allclose(means[0], means[1])


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_losses_and_predictions_are_those_of_the_long_form(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}mtl", sources=(0, 2))
    s.move()
    out = s.forward()
    assert torch.equal(s.method.losses(out, s.batch)["main"], cross_entropy(out.logits, s.batch.label))  # W_2 is 0
    nn.init.normal_(s.method.shift.weight, std=0.1)
    found, e = s.method.losses(out, s.batch), s.method.embeddings()
    logits = long_form(s, out.features, e[[0, 0, 0, 1, 1, 1]])
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-3
    if first:
        p = logits.softmax(1)[range(6), [0, 2, 2, 1, 0, int(logits[5].argmax())]]
        torch.testing.assert_close(found["L_conf"], -p.mean())
    wanted, bias = long_form(s, out.features, e.mean(0).expand(6, -1)), s.model.head.bias.detach().clone()
    tensors = s.method.predicting(s.model)
    assert torch.equal(s.model.head.bias, bias)  # training goes on with its own
    load_trained(s.model, tensors)
    torch.testing.assert_close(s.forward().logits, wanted)
    assert not torch.allclose(s.model.head.bias, bias)


@pytest.mark.parametrize("name", ["mtl", "rsc", "domain-moments", "mdsdi"])
def test_a_head_that_is_not_linear_is_refused(name: str, scene: Callable[..., Any]) -> None:
    s, method = scene("lp-ln"), make_method(Config("photos", "site_c", method=name))
    s.model.add_module("head", nn.Sequential(s.model.head))
    with pytest.raises(ValueError, match=f"method '{name}' needs a linear head.*uses Sequential"):
        (method.extend if name == "mdsdi" else method.setup)(s.model)  # mDSDI replaces the head


# RSC


@pytest.mark.parametrize(("part", "images"), [(0.3333, 0.3333), (0.5, 0.6), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_the_shares_are_of_dimensions_and_images(part: float, images: float) -> None:
    kept = kept_features(torch.randn(6, 9), torch.tensor([0, 2, 1, 1, 0, 2]), nn.Linear(9, 3), part, images)
    assert int((kept == 0).sum()) == round(9 * part) * round(6 * images)
    assert not kept.requires_grad


@pytest.mark.parametrize("first", ["", "patchgen+"])
def test_the_loss_reads_the_muted_features(first: str, scene: Callable[..., Any]) -> None:
    s = scene(f"{first}rsc", hparams={"rsc_features": 0.25, "rsc_samples": 0.5})
    out = s.forward()
    found = s.method.losses(out, s.batch)
    target = torch.tensor([0, 2, 2, 1, 0, int(out.logits[5].argmax())])
    kept = kept_features(out.features, target, s.model.head, 0.25, 0.5)
    logits = s.model.head(out.features * kept)
    torch.testing.assert_close(found["main"], cross_entropy(logits, s.batch.label))
    assert float((found["main"] - cross_entropy(out.logits, s.batch.label)).detach().abs()) > 1e-4
    if first:
        p = logits.softmax(1)[range(6), pseudo_labels(logits, s.batch.label)]
        torch.testing.assert_close(found["L_conf"], -p.mean())


# By style


def outputs(module: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """What a module says while `run` runs, behind all hooks that were there before."""
    said: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, inputs, output: said.append(output))
    run()
    handle.remove()
    return said


def test_one_position_has_no_spread() -> None:
    for mix in (mix_deviations, mix_variances):
        assert mix(torch.randn(3, 1, 4), torch.tensor([2, 0, 1]), torch.tensor([0.3, 1.0, 0.0])).isfinite().all()


# Places


def test_tokens_are_mixed_behind_the_first_quarter_and_the_prefix_passes(scene: Callable[..., Any]) -> None:
    plain, mixing = scene("lp-ln"), scene("mixstyle", hparams={"mixstyle": 1.0})
    [before] = outputs(plain.model.backbone.model.encoder.layer[0], plain.forward)
    torch.manual_seed(5)
    [after] = outputs(mixing.model.backbone.model.encoder.layer[0], mixing.forward)
    torch.manual_seed(5)
    torch.rand(())  # the coin
    share = torch.distributions.Beta(0.1, 0.1).sample((6,))
    order = torch.randperm(6)
    torch.testing.assert_close(after[:, :5], before[:, :5])  # CLS and four registers
    expected = mix_deviations(before[:, 5:], order, share)
    torch.testing.assert_close(after[:, 5:], expected)
    assert not torch.allclose(after[:, 5:], before[:, 5:], atol=1e-3)


def test_maps_are_mixed_behind_the_first_three_stages(resnet_scene: Callable[..., Any]) -> None:
    s = resnet_scene("mixstyle", hparams={"mixstyle": 1.0})
    stages = s.model.backbone.model.encoder.stages
    hooks = [len(stage._forward_hooks) for stage in stages]
    assert hooks == [1, 1, 1, 0]
    torch.manual_seed(5)
    [mixed] = outputs(stages[0], s.forward)
    with torch.no_grad():
        [plain] = outputs(stages[0], s.forward)
    torch.manual_seed(5)
    torch.rand(())
    share, order = torch.distributions.Beta(0.1, 0.1).sample((6,)), torch.randperm(6)
    expected = mix_deviations(plain.flatten(2).transpose(1, 2), order, share)
    torch.testing.assert_close(mixed.flatten(2).transpose(1, 2), expected)


def test_the_probability_is_that_of_a_place(resnet_scene: Callable[..., Any]) -> None:
    s = resnet_scene("mixstyle", hparams={"mixstyle": 0.25}, tune="head")
    stage, maps = s.model.backbone.model.encoder.stages[0], torch.randn(4, 8, 8, 8)
    with torch.no_grad():
        plain = stage(maps)
    torch.manual_seed(0)
    mixed = sum(not torch.equal(stage(maps), plain) for _ in range(200))
    assert 30 <= mixed <= 70


def test_sagnet_works_behind_the_second_stage(resnet_scene: Callable[..., Any]) -> None:
    s = resnet_scene("sagnet")
    assert [len(stage._forward_hooks) for stage in s.model.backbone.model.encoder.stages] == [0, 1, 0, 0]
    assert s.method.style.each.in_features == 12


# Passes that are left alone


@pytest.mark.parametrize("name", ["mixstyle", "sagnet"])
def test_evaluation_and_prediction_are_left_alone(name: str, scene: Callable[..., Any]) -> None:
    sure = {"mixstyle": 1.0} if name == "mixstyle" else {}
    plain, mixing = scene("lp-ln"), scene(name, hparams=sure)
    with torch.no_grad():
        torch.testing.assert_close(mixing.forward().logits, plain.forward().logits)
    assert not torch.allclose(mixing.forward().logits, plain.forward().logits, atol=1e-4)
    built = build_model(mixing.method.config, make_method(mixing.method.config), 3)  # as for predictions and maps
    torch.testing.assert_close(built(mixing.batch.image).logits, plain.forward().logits)


# SagNet's terms


def test_sagnet_has_the_published_terms(scene: Callable[..., Any]) -> None:
    s = scene("sagnet", hparams={"sagnet": 0.5})
    torch.manual_seed(7)
    out = s.forward()
    seen = s.method.seen.detach()
    state = torch.random.get_rng_state()
    found = s.method.losses(out, s.batch)
    torch.random.set_rng_state(state)
    style, labelled = s.method.style, s.batch.label >= 0
    logits = style(swap_content(seen, torch.randperm(6)))
    torch.testing.assert_close(found["L_style"], F.cross_entropy(logits[labelled], s.batch.label[labelled]))
    uniform = torch.full_like(logits, 1 / 3)
    torch.testing.assert_close(found["L_adv"], 0.5 * F.cross_entropy(logits, uniform))
    torch.testing.assert_close(found["main"], F.cross_entropy(out.logits[labelled], s.batch.label[labelled]))


# Blocks that return tuples


@pytest.mark.parametrize("method", ["mixstyle", "sagnet", "miro"])
def test_blocks_that_return_tuples_are_hooked_as_others(method: str, scene: Callable[..., Any]) -> None:
    """data2vec: the step trains, and a block hands on a tuple whose tensor was changed (by MIRO: was not)."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    more = {"patch_size": 4, "image_size": 16, "use_mean_pooling": False, "use_relative_position_bias": True}
    torch.manual_seed(3)
    backbone = Backbone(Loaded(build_generic("data2vec-vision", {**sizes, **more})), "small", "small")
    plain = scene("lp-ln", network=backbone, image_size=16)
    place: nn.Module = backbone.model.get_submodule(backbone.family.blocks)[0]
    [before] = outputs(place, plain.forward)
    s = scene(method, network=backbone, image_size=16, hparams={"mixstyle": 1.0} if method == "mixstyle" else {})
    found: list[Any] = []
    [after] = outputs(place, lambda: found.append(s.forward()))
    assert isinstance(before, tuple) and isinstance(after, tuple) and len(after) == len(before)
    assert torch.equal(after[0][:, :1], before[0][:, :1])  # CLS passes as it is
    assert torch.allclose(after[0], before[0], atol=1e-4) == (method == "miro")
    torch.stack(list(s.method.losses(found[0], s.batch).values())).sum().backward()
    assert all(parameter.grad is not None for parameter in s.method.parameters())

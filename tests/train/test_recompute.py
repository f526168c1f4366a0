"""Activations that are computed again: the same gradients and runs, each block run twice a step, never with hooks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from patchgen.config import Config
from patchgen.methods.build import recompute_activations
from patchgen.model.backbone import Backbone
from patchgen.model.convert import Loaded, build
from patchgen.model.tuning import set_tuning
from patchgen.runs.tensors import load_tensors
from patchgen.train.lifecycle import train

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}


def small(kind: str) -> Backbone:
    # probabilities of dropout, so that a part of a block in training mode would show
    more = {"hidden_dropout_prob": 0.5, "drop_path_rate": 0.5} if kind in ("dinov3_vit", "beit") else {}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Backbone(Loaded(build(kind, SMALL | more)), kind, kind)


def gradients(backbone: Backbone, tune: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Of a sum of squares, by name; and how often each block's first LayerNorm ran."""
    calls: list[int] = []
    for i, block in enumerate(backbone.model.get_submodule(backbone.family.blocks)):
        calls.append(0)
        norm = next(part for part in block.modules() if isinstance(part, torch.nn.LayerNorm))
        norm.forward = counted(norm.forward, calls, i)
    names = set_tuning(backbone, tune)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    backbone(images).patches.square().sum().backward()
    return {name: backbone.get_parameter(name).grad for name in names}, calls  # type: ignore[misc]


def counted(forward: Any, calls: list[int], i: int) -> Any:
    def run(*given: Any) -> Any:
        calls[i] += 1
        return forward(*given)

    return run


@pytest.mark.parametrize("tune", ["layernorm", "full"])
@pytest.mark.parametrize(
    "kind",
    ["dinov2_with_registers", "vit", "vit_mae", "clip_vision_model", "dinov3_vit", "beit", "siglip_vision_model"],
)
def test_gradients_are_the_same_and_each_block_runs_twice(kind: str, tune: str) -> None:
    plain, once = gradients(small(kind), tune)
    backbone = small(kind)
    recompute_activations(backbone, "lp-ln")
    again, twice = gradients(backbone, tune)
    assert (once, twice) == ([1, 1], [2, 2])
    assert plain.keys() == again.keys() and plain
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["patchgen", "mldg"])
def test_a_run_has_the_same_name_and_numbers(method: str, tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**tiny_settings, "method": method, "steps": 3, "threads": 1}
    plain = train(Config(**settings), tmp_path / "plain", quiet=True)
    again = train(Config(**settings, checkpoint_activations=True), tmp_path / "again", quiet=True)
    assert plain.path.name == again.path.name
    tensors = [load_tensors(run.checkpoint("swad"))[0] for run in (plain, again)]
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["miro", "gmdg", "mixstyle", "sagnet", "arm", "patchgen+miro"])
def test_methods_with_hooks_within_the_backbone_are_refused(
    method: str, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    config = Config(**{**tiny_settings, "method": method, "swad": False}, checkpoint_activations=True)
    with pytest.raises(ValueError, match="checkpoint_activations runs each block twice, and method '" + method[:4]):
        train(config, tmp_path, quiet=True)


def test_convolutional_backbones_are_refused() -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    backbone = Backbone(Loaded(transformers.ResNetModel(config)), "small", "small")
    with pytest.raises(ValueError, match="needs a backbone of transformer blocks.*resnet"):
        recompute_activations(backbone, "lp-ln")

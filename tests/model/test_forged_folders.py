"""Folders with sizes that their weights do not have, or with values that no network has: one sentence, at no cost."""

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.encoders import SMALL, write_timm
from patchgen.model.backbone import load_backbone
from patchgen.model.convert import build

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8,
         "image_size": 32}  # fmt: skip
KINDS = {"vit": "ViT", "dinov2": "Dinov2", "clip_vision_model": "CLIPVision", "siglip_vision_model": "SiglipVision",
         "deit": "DeiT"}  # fmt: skip
State = dict[str, Tensor]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, KINDS[request.param] + "Config")(**SIZES)
    getattr(transformers, KINDS[request.param] + "Model")(config).save_pretrained(path)
    return path


@contextmanager
def refused_cheaply(words: str | None = None) -> Iterator[None]:
    """A ValueError in one sentence, within 10 s (they take milliseconds) and 200 MB."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(ValueError, match=words) as caught:
        yield
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200


def changed(folder: Path, target: Path, facts: dict[str, Any], change: Callable[[State], object] | None = None) -> str:
    about = json.loads((folder / "config.json").read_text()) | facts
    (target / "config.json").write_text(json.dumps(about))
    state = load_file(folder / "model.safetensors")
    if change:
        change(state)
    save_file(state, target / "model.safetensors")
    return str(target)


@pytest.mark.parametrize("facts", [
    {"num_hidden_layers": 1_000_000}, {"num_hidden_layers": 0}, {"num_hidden_layers": 3}, {"hidden_size": 16_384},
    {"hidden_size": "64"}, {"hidden_size": 31}, {"num_attention_heads": 0}, {"num_attention_heads": -2},
    {"layer_norm_eps": -1}, {"layer_norm_eps": float("nan")}, {"layer_norm_eps": 1e38}, {"hidden_act": "odd"},
    {"patch_size": 0}, {"patch_size": 1e400}, {"patch_size": [8, 4]}, {"image_size": 16_384},
], ids=str)  # fmt: skip
def test_a_forged_config_is_refused(facts: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with refused_cheaply():
        load_backbone(changed(folder, tmp_path, facts))


def widen(state: State) -> None:
    name = next(name for name in state if name.endswith("fc1.weight") or "intermediate.dense.weight" in name)
    state[name] = torch.zeros(65, 32)


def spoil(state: State) -> None:
    next(tensor for name, tensor in state.items() if name.endswith("weight") and tensor.ndim == 2)[0, 0] = torch.inf


@pytest.mark.parametrize("change", [State.clear, widen], ids=["no tensors", "another width"])
def test_forged_weights_are_refused(change: Callable[[State], object], folder: Path, tmp_path: Path) -> None:
    with refused_cheaply():
        load_backbone(changed(folder, tmp_path, {}, change))


@pytest.mark.parametrize("folder", ["vit", "dinov2", "clip_vision_model"], indirect=True)
@pytest.mark.parametrize("kind", ["infinite", "whole numbers", "no dimensions"])
def test_plain_vits_hold_finite_numbers(kind: str, folder: Path, tmp_path: Path) -> None:
    def change(state: State) -> None:
        if kind == "infinite":
            return spoil(state)
        for name in state:
            state[name] = state[name].long() if kind == "whole numbers" else torch.zeros(())
        return None

    with refused_cheaply(r"does not fill|holds values"):
        load_backbone(changed(folder, tmp_path, {}, change))


@pytest.mark.parametrize(("about", "changes", "words"), [
    ({"model_args": {"qk_norm": True}}, {}, "qk_norm True"),
    ({"model_args": {"act_layer": "quick_gelu"}}, {}, "act_layer 'quick_gelu'"),
    ({"model_args": {"act_layer": "silu"}}, {}, "act_layer 'silu'"),
    ({"model_args": {}}, {}, "num_heads into model_args"),
    ({}, {"norm_pre.weight": (64,)}, "'norm_pre.weight' is not part of a plain ViT"),
    ({}, {"blocks.0.attn.q_norm.weight": (16,)}, r"q_norm\.weight' is not part"),
    ({}, {"cls_token": None}, "cls_token not found"),
    ({}, {"pos_embed": (1, 19, 64)}, "19 position embeddings"),
    ({}, {"blocks.2.norm2.bias": None}, r"does not fill.*norm2\.bias"),
    ({}, {"blocks.0.mlp.fc2.weight": (64, 100)}, "feed-forward layers of 256 and 100"),
    ({"architecture": 5}, {}, "plain vision transformer"),
    ({"model_args": {"num_heads": True}}, {}, "num_heads into model_args"),
    ({"model_args": {"num_heads": 5}}, {}, "num_heads into model_args"),
    ({"model_args": {"patch_size": [14, 14], "num_heads": "4"}}, {}, "num_heads into model_args"),
    ({}, {"blocks.20000.norm1.weight": (64,)}, "does not fill"),
    ({}, {"cls_token": ()}, "cls_token not found"),
    ({}, {"pos_embed": ()}, "pos_embed not found"),
    ({}, {"reg_token": ()}, "its widths"),
    ({}, {"reg_token": (1, 2, 63)}, r"its widths \[64, 64, 63\]"),
    ({}, {"blocks.1.attn.qkv.weight": ()}, "attn.qkv.weight.*misshapen"),
    ({}, {"blocks.1.attn.qkv.weight": (10, 64)}, "attn.qkv.weight.*misshapen"),
    ({}, {"blocks.1.norm1.weight": (65,)}, r"norm1.weight is \(65,\) in the weights"),
    ({}, {"patch_embed.proj.weight": (64, 1, 8, 8)}, "1 channels"),
], ids=str)  # fmt: skip
def test_a_forged_timm_folder_is_refused(
    about: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_timm(SMALL, tmp_path, about, changes)
    with refused_cheaply(rf"(?s){words}"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("family", ["dinov2_with_registers", "siglip_vision_model", "resnet"])
@pytest.mark.parametrize("facts", [
    {"num_hidden_layers": 1000, "depths": [1000, 1, 1, 1]},
    {"hidden_size": 16_384, "num_attention_heads": 16, "hidden_sizes": [9000, 9000, 9000, 9000]},
], ids=str)  # fmt: skip
def test_an_architecture_is_bounded_by_the_tensors_it_will_get(family: str, facts: dict[str, Any]) -> None:
    """As in a model folder, whose weights come from the same file."""
    with refused_cheaply("the weights have"):
        build(family, {**SIZES, **facts}, {"weight": torch.zeros(64)})


def test_tensors_of_a_pickle_are_no_larger_than_its_data(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({"embeddings.cls_token": torch.zeros(1).expand(1 << 40)}, tmp_path / "pytorch_model.bin")
    with refused_cheaply("no plain tensor"):
        load_backbone(str(tmp_path))

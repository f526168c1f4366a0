"""The adapter of timm: its logic on a stand-in, and on timm itself where that can be imported."""

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from drawn import images
from torch import Tensor, nn

from patchgen.model.backbone import load_backbone
from patchgen.model.convert import build
from patchgen.model.generic import build_timm, hide_broken_torchvision
from patchgen.model.tuning import set_tuning

try:
    import timm as real_timm
except Exception:  # a torchvision of another build breaks its import with several types of errors
    real_timm = None
needs_timm = pytest.mark.skipif(real_timm is None, reason="timm (or the torchvision it needs) cannot be imported here")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class StandIn(nn.Module):
    """What the adapter uses of timm's VisionTransformer, under its names; `fc_norm`: the kind that norms its mean."""

    def __init__(self, fc_norm: bool = False, dim: int = 16, registers: int = 2) -> None:
        super().__init__()
        self.num_features, self.num_prefix_tokens = dim, 1 + registers
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, dim, 4, 4)
        self.patch_embed.patch_size = (4, 4)  # type: ignore[assignment]
        self.prefix = nn.Parameter(torch.randn(1, 1 + registers, dim))
        self.blocks = nn.Sequential(Block(dim), Block(dim), Block(dim))
        self.norm = nn.Identity() if fc_norm else nn.LayerNorm(dim)
        self.fc_norm = nn.LayerNorm(dim) if fc_norm else nn.Identity()
        self.attn_pool = nn.Linear(dim, dim)  # never reaches the tokens
        self.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "license": "apache-2.0"}

    def forward_features(self, x: Tensor) -> Tensor:
        patches = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(torch.cat([self.prefix.expand(len(x), -1, -1), patches], 1)))


class FakeTimm(ModuleType):
    """timm's one function that is called, and a record of the calls."""

    __version__ = "1.0.0"
    layers = SimpleNamespace(SwiGLUPacked="SwiGLUPacked")

    def __init__(self) -> None:
        super().__init__("timm")
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def create_model(self, name: str, **arguments: Any) -> nn.Module:
        self.asked.append((name, arguments))
        if name == "resnet50":
            raise TypeError("ResNet.__init__() got an unexpected keyword argument 'dynamic_img_size'")
        if name == "convnet":
            return nn.Conv2d(3, 3, 1)
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        return StandIn(fc_norm=name.startswith("mean_"))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> FakeTimm:
    import transformers  # noqa: F401  it asks for timm when it is first imported: then there must be no stand-in

    fake = FakeTimm()
    monkeypatch.setitem(sys.modules, "timm", fake)
    return fake


def test_tokens_are_those_of_forward_features(timm: FakeTimm) -> None:
    backbone = load_backbone("timm:vit_small", image_size=16)
    assert timm.asked == [("vit_small", {"pretrained": True, "num_classes": 0, "dynamic_img_size": True})]
    expected, tokens = backbone.model.net.forward_features(images(12, 20)), backbone(images(12, 20))
    torch.testing.assert_close(tokens.patches, expected[:, 3:])
    torch.testing.assert_close(tokens.cls, expected[:, 0])
    assert (tokens.grid, backbone.dim, backbone.patch_size, backbone.num_prefix_tokens) == ((3, 5), 16, 4, 3)
    assert (backbone.mean, backbone.std, backbone.licence) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "apache-2.0")
    assert backbone.resolved == "timm 1.0.0, vit_small"
    with pytest.raises(ValueError, match="multiples of the patch size 4"):
        load_backbone("timm:vit_small", image_size=18)


@pytest.mark.parametrize(("name", "norm"), [("vit", "norm"), ("mean_vit", "fc_norm")])
def test_layernorm_tuning_reaches_the_final_norm(timm: FakeTimm, name: str, norm: str) -> None:
    backbone = load_backbone(f"timm:{name}")
    names = set_tuning(backbone, "layernorm")
    assert len(names) == 2 * (3 * 2 + 1) and f"model.net.{norm}.weight" in names
    tokens = backbone(images(8, 8))
    tokens.patches.square().sum().backward()
    assert [one for one, parameter in backbone.named_parameters() if parameter.grad is not None] == names
    raw = backbone.model.net.forward_features(images(8, 8))
    expected = backbone.model.net.fc_norm(raw) if norm == "fc_norm" else raw
    torch.testing.assert_close(tokens.patches, expected[:, 3:])
    assert set_tuning(backbone, "last_block")[0].startswith("model.net.blocks.2.")
    assert not any("attn_pool" in one for one, _ in backbone.named_parameters())


def test_random_weights_are_the_same_each_time_and_leave_the_generator(timm: FakeTimm) -> None:
    state = torch.get_rng_state()
    first, second = (load_backbone("timm:vit", pretrained=False) for _ in range(2))
    assert first.digest() == second.digest() and torch.equal(torch.get_rng_state(), state)
    assert timm.asked[0][1]["pretrained"] is False and "random weights" in first.resolved


def test_what_a_model_card_asks_for_is_given(timm: FakeTimm) -> None:
    def asked(name: str) -> dict[str, Any]:
        build_timm(name, pretrained=True)
        usual = ("pretrained", "num_classes", "dynamic_img_size")
        return {key: value for key, value in timm.asked[-1][1].items() if key not in usual}

    gated = {"mlp_layer": "SwiGLUPacked", "act_layer": nn.SiLU}
    assert asked("hf-hub:MahmoodLab/UNI") == {"init_values": 1e-5}
    assert asked("hf-hub:paige-ai/Virchow2") == gated
    more = asked("hf-hub:MahmoodLab/UNI2-h")
    assert gated.items() <= more.items() and (more["depth"], more["embed_dim"], more["reg_tokens"]) == (24, 1536, 8)
    assert asked("hf-hub:somebody/UNI") == asked("mahmoodlab/uni") == {}


@pytest.mark.parametrize(("name", "reason"), [
    ("resnet50", "vision transformer for images of any size"),
    ("convnet", "lacks hidden_size"),
    ("nothing", r"Unknown model.*list_models"),
])  # fmt: skip
def test_other_networks_are_refused(timm: FakeTimm, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_backbone(f"timm:{name}")


class Broken:
    """A finder of modules: torchvision is installed but fails on import, and timm needs it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in ("torchvision", "timm") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        self.asked.append(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "timm":
            importlib.import_module("torchvision")
        raise RuntimeError("operator torchvision::nms does not exist")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    finder = Broken()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "timm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))  # restores whatever is there afterwards
    del sys.modules["torchvision"]
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    hide_broken_torchvision.cache_clear()
    return finder


def test_a_broken_torchvision_is_a_sentence_where_timm_is_asked_for(broken: Broken) -> None:
    command = re.escape(f'pip install "patchgen[timm]" "torch=={torch.__version__}"')
    with pytest.raises(ValueError, match=rf"{command}.*nms does not"):
        load_backbone("timm:vit_small_patch14_dinov2.lvd142m")
    assert broken.asked == ["timm", "torchvision"]


def test_a_broken_torchvision_is_not_imported_by_plain_vits_and_hidden_from_other_models(broken: Broken) -> None:
    load_backbone("tiny")
    load_backbone(load_backbone("tiny").model)
    assert not broken.asked
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    build("siglip_vision_model", sizes)
    assert broken.asked == ["torchvision"] and importlib.util.find_spec("torchvision") is None


def test_a_model_object_is_copied() -> None:
    net = StandIn()
    net.pretrained_cfg["architecture"] = "vit_small_patch4"  # type: ignore[assignment]
    backbone = load_backbone(net)
    torch.testing.assert_close(backbone(images(8, 12)).patches, net.forward_features(images(8, 12))[:, 3:])
    assert backbone.model.config.to_diff_dict() == {"name": "vit_small_patch4"} and backbone.mean == (0.1, 0.2, 0.3)
    assert all(parameter.requires_grad for parameter in net.parameters()) and net.attn_pool is not None
    with torch.no_grad():
        backbone.model.net.norm.weight.zero_()
    assert net.norm.weight.any()  # type: ignore[union-attr, operator]


@needs_timm
@pytest.mark.parametrize(
    ("name", "prefix", "patch"), [("vit_tiny_patch16_224", 1, 16), ("vit_small_patch14_reg4_dinov2", 5, 14)]
)
def test_timm_itself(name: str, prefix: int, patch: int) -> None:
    backbone = load_backbone(f"timm:{name}", pretrained=False)
    tokens = backbone(images(2 * patch, 3 * patch))
    expected = backbone.model.net.forward_features(images(2 * patch, 3 * patch))
    torch.testing.assert_close(tokens.patches, expected[:, prefix:])
    assert (backbone.num_prefix_tokens, tokens.grid) == (prefix, (2, 3))
    assert len(set_tuning(backbone, "layernorm")) == 2 * (12 * 2 + 1)

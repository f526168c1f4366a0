"""Vision transformers that are in no table: against the model's own output, and refused where they do not fit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import images
from torch.nn import functional
from transformers.utils import logging as hf_logging

from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.convert import Loaded, build
from patchgen.model.generic import FAMILIES, adopt, quiet_loading
from patchgen.model.tuning import TUNING, set_tuning

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
NO_POOL = {"use_mean_pooling": False, "use_relative_position_bias": True}
# model type, settings of its own, prefix tokens, parts that never reach the tokens
CASES: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
    ("deit", {}, 2, ("pooler.",)),
    ("beit", NO_POOL, 1, ()),
    ("dinov3_vit", {"num_register_tokens": 3}, 4, ("embeddings.mask_token",)),
    ("ijepa", {}, 0, ()),
    ("siglip_vision_model", {}, 0, ("head.",)),
    ("vit_msn", {}, 1, ()),
    ("data2vec-vision", NO_POOL, 1, ()),
]
every_case = pytest.mark.parametrize(("kind", "more", "prefix", "unused"), CASES, ids=[case[0] for case in CASES])


def original(kind: str, **more: Any) -> Any:
    """A model as transformers makes it, every tensor random, so that a forgotten one shows."""
    assert kind not in FAMILIES
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **SMALL, **more)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def saved(model: Any, folder: Path) -> Backbone:
    model.save_pretrained(folder)
    return load_backbone(str(folder))


@every_case
def test_a_folder_gives_the_tokens_of_its_own_model(
    kind: str, more: dict[str, Any], prefix: int, unused: tuple[str, ...], tmp_path: Path
) -> None:
    model = original(kind, **more)
    backbone = saved(model, tmp_path)
    for size in ((16, 16), (12, 20)):
        resize = {} if kind == "dinov3_vit" else {"interpolate_pos_encoding": True}
        expected = model(images(*size), **resize).last_hidden_state
        tokens = backbone(images(*size))
        assert tokens.grid == (size[0] // 4, size[1] // 4)
        torch.testing.assert_close(tokens.patches, expected[:, prefix:])
        torch.testing.assert_close(tokens.cls, expected[:, 0] if prefix else expected.mean(1))
    assert (backbone.num_prefix_tokens, backbone.dim, backbone.patch_size) == (prefix, 32, 4)
    dropped = set(model.state_dict()) - set(backbone.model.state_dict())
    assert dropped == {name for name in model.state_dict() if unused and name.startswith(unused)}
    assert backbone.frozen and not tokens.patches.requires_grad


@pytest.mark.parametrize(("kind", "more"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_patches_are_in_row_major_order(kind: str, more: dict[str, Any]) -> None:
    """With attention silenced the token of a patch depends on its pixels alone."""
    backbone = Backbone(Loaded(original(kind, **more)), "small", "small")
    for name, part in backbone.named_modules():
        if name.endswith(("attention", "self_attn")):
            part.register_forward_hook(lambda module, inputs, output: silent(output))
    plain, changed = images(12, 16), images(12, 16)
    changed[:, :, 4:8, 8:12] += 1  # row 1, column 2 of a 3 x 4 grid
    moved = (backbone(plain).patches - backbone(changed).patches).abs().amax(-1)[0]
    assert (moved > 1e-3).nonzero().flatten().tolist() == [1 * 4 + 2]


def silent(output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


@pytest.mark.parametrize("mode", sorted(TUNING))
@pytest.mark.parametrize(("kind", "more"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_every_trainable_tensor_gets_a_gradient_and_no_other(kind: str, more: dict[str, Any], mode: str) -> None:
    backbone = Backbone(Loaded(original(kind, **more)), "small", "small")
    names = set_tuning(backbone, mode)
    tokens = backbone(images(8, 12))
    if names:
        (tokens.patches.square().sum() + tokens.cls.sum()).backward()
    assert [name for name, parameter in backbone.named_parameters() if parameter.grad is not None] == names
    if mode == "layernorm":  # two a block and the final one, a weight and a bias each
        assert len(names) == 2 * (2 * 2 + 1)
    if mode == "last_block":
        assert not any(f"{backbone.family.blocks}.0." in name for name in names)


def test_rms_norms_are_norms_too() -> None:
    backbone = Backbone(Loaded(original("sapiens2")), "small", "small")
    names = set_tuning(backbone, "layernorm")
    assert names and all("norm" in name for name in names)


@pytest.mark.parametrize(("kind", "norm"), [("beit", "pooler.layernorm"), ("mlcd_vision_model", "post_layernorm")])
def test_a_norm_of_the_pooled_vector_alone_is_given_to_the_tokens(kind: str, norm: str) -> None:
    """BEiT norms the mean of its patches, MLCD its CLS, as CLIP does."""
    backbone = Backbone(Loaded(original(kind)), "small", "small")
    part: Any = backbone.model.get_submodule(norm)
    raw = backbone.model(images(16, 16), interpolate_pos_encoding=True).last_hidden_state
    expected = functional.layer_norm(raw, (32,), part.weight, part.bias, part.eps)
    torch.testing.assert_close(backbone(images(16, 16)).patches, expected[:, 1:])
    assert (backbone.family.final_norm, backbone.family.norm_tokens) == (norm, True)


def test_of_two_towers_the_one_for_images_is_taken(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    whole = transformers.SiglipModel(transformers.SiglipConfig(vision_config=SMALL, text_config=text)).eval()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    backbone = saved(whole, tmp_path)
    torch.testing.assert_close(backbone(images(16, 16)).patches, whole.vision_model(images(16, 16)).last_hidden_state)
    assert (backbone.model_type, backbone.mean, backbone.std) == ("siglip_vision_model", (0.1,) * 3, (0.2,) * 3)


def test_the_architecture_alone_builds_it_again() -> None:
    first = Backbone(Loaded(original("dinov3_vit")), "small", "small")
    again = build(first.model_type, {k: v for k, v in first.model.config.to_diff_dict().items() if k != "model_type"})
    again.load_state_dict(first.model.state_dict())
    second = Backbone(Loaded(again), "small", "small")
    torch.testing.assert_close(second(images(8, 8)).patches, first(images(8, 8)).patches)
    assert second.digest() == first.digest()


def test_the_look_at_a_model_moves_no_random_numbers() -> None:
    model = original("vit_msn")
    state = torch.get_rng_state()
    assert adopt(model) == adopt(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_missing_in_a_folder_is_not_made_up(tmp_path: Path) -> None:
    model = original("deit")
    state = model.state_dict()
    without_pooler = {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}
    model.save_pretrained(tmp_path, state_dict=without_pooler)
    assert load_backbone(str(tmp_path)).num_prefix_tokens == 2
    del without_pooler["layers.1.mlp.fc2.bias"]
    model.save_pretrained(tmp_path, state_dict=without_pooler)
    with pytest.raises(ValueError, match=r"does not fill a DeiTModel.*layers\.1\.mlp\.fc2\.bias"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize(("kind", "reason"), [
    ("vitdet", r"last_hidden_state is \(B, prefix \+ P, 32\).*VitDetModel is \(2, 32, 4, 4\)"),
    ("aimv2_vision_model", "does not accept images of any size"),
    ("pixtral", "number of prefix tokens"),
])  # fmt: skip
def test_models_of_another_shape_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        adopt(original(kind))


def test_folders_of_other_models_are_refused(tmp_path: Path) -> None:
    transformers.BertModel(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'bert'.*lacks patch_size"):
        load_backbone(str(tmp_path))


def test_a_model_without_blocks_is_refused() -> None:
    model = torch.nn.Linear(3, 3)
    model.config = transformers.ViTConfig(**SMALL)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no list of 2 blocks"):
        adopt(model)


# Nothing on the screen


def write(folder: Path, kind: str) -> Path:
    """A model with a tensor too many, of which transformers would report."""
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **SMALL))
    model.register_parameter("superfluous", torch.nn.Parameter(torch.zeros(1)))
    model.save_pretrained(folder)
    return folder


def said(code: str, folders: list[Path]) -> str:
    """What a process of its own writes on stderr: transformers keeps the stream that it was imported with."""
    command = [sys.executable, "-c", f"import sys\n{code}", *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
def test_nothing_is_written(tmp_path: Path) -> None:
    folders = [write(tmp_path / kind, kind) for kind in ("dinov2", "dinov3_vit")]  # the second is found by looking
    loud = said("import transformers; transformers.AutoModel.from_pretrained(sys.argv[1])", folders)
    assert "Loading weights" in loud and "superfluous" in loud  # so that silence means something
    code = (
        "from patchgen.model.backbone import load_backbone\nload_backbone(sys.argv[1])\n"
        "slow = {'transformers', 'torch._dynamo', 'sympy', 'torchvision'} & set(sys.modules)\n"
        "assert not slow, slow\n"  # a plain ViT starts without what costs seconds to import
        "load_backbone(sys.argv[2])"
    )
    assert said(code, folders) == ""


def test_settings_are_put_back() -> None:
    before = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    with pytest.raises(OSError), quiet_loading():
        assert not hf_logging.is_progress_bar_enabled() and hf_logging.get_verbosity() == hf_logging.ERROR
        raise OSError
    assert (hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()) == before

"""A model folder is numbers: code, kernels, adapters and prompts in its config.json reach nobody."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from patchgen.model.convert import build, read_folder
from patchgen.model.generic import allowed

VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
CODE = {
    "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"},
    "_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel",
    "_attn_implementation_internal": "someone/kernel", "_experts_implementation": "someone/kernel",
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}, "use_kernels": True,
    "name_or_path": "someone/else", "per_layer_config": {"0": {"hidden_size": 64}}, "dtype": "float16",
}  # fmt: skip


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders in which `evil.py` would leave a mark; a question to the user fails the test."""

    def ask(*_: object) -> str:
        raise AssertionError("the user was asked whether to run code")

    monkeypatch.setattr("builtins.input", ask)
    return tmp_path


@pytest.mark.parametrize("model_type", ["vit", "deit", "siglip_vision_model"])
def test_code_in_a_backbone_folder_is_not_run(evil: Path, model_type: str) -> None:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **VIT))
    model.save_pretrained(evil)
    expected = {name: tensor.clone() for name, tensor in read_folder(evil).model.state_dict().items()}
    facts = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(json.dumps({**facts, **CODE}))
    mark = evil / "mark"
    (evil / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nEvilConfig = EvilModel = None\n")
    (evil / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b", "peft_type": "LORA"}))
    modules = set(sys.modules)
    found = read_folder(evil).model
    assert not mark.exists() and not [name for name in set(sys.modules) - modules if "evil" in name]
    assert getattr(found.config, "_attn_implementation", "sdpa") in ("sdpa", "eager")
    assert not hasattr(found.config, "auto_map")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2"])
def test_code_in_a_model_folders_architecture_is_not_run(evil: Path, family: str) -> None:
    model = build(family, {**VIT, "mlp_ratio": 2, **CODE})
    assert not hasattr(model.config, "auto_map") and not hasattr(model.config, "quantization_config")
    assert getattr(model.config, "_attn_implementation", "sdpa") in ("sdpa", "eager")
    assert model.config.hidden_size == 32
    assert next(model.parameters()).dtype == torch.float32


def test_only_declared_fields_with_plain_values_are_allowed() -> None:
    from transformers import ViTConfig

    deep: Any = 1
    for _ in range(5):
        deep = [deep]
    given = {"hidden_size": 8, "patch_size": [4, 4], "image_size": {"a": 1}, "qkv_bias": deep, "hidden_act": "x" * 101}
    assert allowed(ViTConfig, {**given, **CODE, "id2label": {}}) == {"hidden_size": 8, "patch_size": [4, 4]}


@pytest.mark.parametrize(
    "recorded",
    [["os"], [{"name": "x.py", "version": "../../x"}], [{}], [{"name": "evil; curl x | sh", "version": "1"}]],
)
def test_a_folder_brings_no_plugin(recorded: list[object]) -> None:
    from patchgen.common.plugins import require

    with pytest.raises(ValueError, match="which is not known on this machine") as error:
        require(recorded, "model")
    assert "pip install" not in str(error.value)


def test_weights_are_those_of_the_folder(evil: Path) -> None:
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**VIT)).save_pretrained(evil / "inside")
    (evil / "inside" / "model.safetensors").rename(evil / "outside.safetensors")
    (evil / "inside" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"layernorm.weight": "../outside.safetensors"}})
    )
    save_file({"layernorm.weight": torch.ones(32)}, evil / "inside" / "model-1.safetensors")
    with pytest.raises(ValueError, match="0 blocks"):
        read_folder(evil / "inside")

"""--tune lora: low-rank updates by peft, in runs, model folders and exported files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("peft", reason="the extra `lora` is not installed")

from patchgen.config import Config
from patchgen.fit.procedure import finish
from patchgen.methods import make_method
from patchgen.methods.build import build_model
from patchgen.model import tuning
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import trained_tensors
from patchgen.model.tuning import merged, patch_attention, set_tuning
from patchgen.predict.export import drawn_images, export
from patchgen.predict.model_folder import read_model, write_model
from patchgen.predict.predictor import load_run
from patchgen.tasks import make_fold


def test_only_the_updates_learn_and_they_begin_at_nothing() -> None:
    plain, tuned = load_backbone("tiny"), load_backbone("tiny")
    names = set_tuning(tuned, "lora", 4)
    assert len(names) == 2 * 3 * 2 and all("lora_" in name for name in names)  # A and B of q, k, v in two blocks
    assert sum(p.numel() for p in tuned.parameters() if p.requires_grad) == 6 * 4 * (64 + 64)
    images = torch.randn(2, 3, 28, 28)
    assert torch.equal(tuned(images).patches, plain(images).patches)
    assert tuned.digest() == plain.digest()  # the pretrained weights are what they were


def test_merging_gives_the_same_answers_without_peft() -> None:
    backbone = load_backbone("tiny")
    set_tuning(backbone, "lora", 2)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    plain, images = merged(backbone), torch.randn(2, 3, 28, 28)
    assert not any("lora" in name for name, _ in plain.named_modules())
    before = load_backbone("tiny")(images).cls
    assert (plain(images).cls - backbone(images).cls).abs().max() < 1e-4 < (before - backbone(images).cls).abs().max()
    assert any("lora" in name for name, _ in backbone.named_modules())  # the original keeps its updates
    assert torch.allclose(patch_attention(plain, images), patch_attention(backbone, images), atol=1e-5)


def test_the_seed_decides_the_updates() -> None:
    def first(seed: int) -> torch.Tensor:
        config = Config(data="x", unseen="a", method="lp-ln", tune="lora", backbone="tiny", image_size=28, seed=seed)
        tensors = trained_tensors(build_model(config, make_method(config), 3))
        return next(tensor for name, tensor in tensors.items() if "lora_A" in name).detach()

    torch.manual_seed(5)
    one = first(1)
    assert torch.equal(one, first(1)) and not torch.equal(one, first(2))


@pytest.mark.parametrize("method", ["lp-ln", "patchgen-select"])
def test_a_run_becomes_a_model_folder_and_an_onnx_file(
    method: str, tiny_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = tiny_run(method, tune="lora", lora_rank=2, image_size=28, swad=False, steps=3)
    saved = load_run(run.path)
    assert any("lora_B" in name and tensor.any() for name, tensor in trained_tensors(saved.model).items())
    model = finish(run, make_fold(run.config), [], quiet=True)
    folder = write_model(tmp_path / "model", model)
    images = drawn_images(3, 28)
    again = read_model(folder).predictor
    original = model.predictor.score(images)
    for one, other in zip(original, again.score(images), strict=True):
        np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-6)
    if method == "lp-ln":
        pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
        assert export(again, tmp_path / "model.onnx", images)["probabilities"].value < 1e-4


def test_without_peft_it_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs peft: install it with `pip install 'patchgen\[lora\]'`"):
        make_method(Config(data="x", unseen="a", method="lp-ln", tune="lora"))


def test_a_convolutional_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match="attention layers of a vision transformer"):
        set_tuning(load_backbone("resnet50", pretrained=False), "lora")

"""CLIP and CoOp against transformers' own CLIP, with a small random one in a folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.fit.procedure import fit
from patchgen.methods import make_method
from patchgen.methods.build import build_model
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import trained_tensors
from patchgen.model.clip import TextTower, load_text
from patchgen.predict.model_folder import read_model, write_model
from patchgen.predict.predictor import load_run
from patchgen.runs.tensors import load_tensors

CLASSES = ("circle", "cross", "round_square")
WORDS = ("circle", "cross", "round square")
VECTORS = "head.sentences.vectors"


@torch.no_grad()
def by_transformers(folder: Path, images: Tensor, texts: list[str]) -> Tensor:
    """(B, C) logits of the whole CLIPModel."""
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)
    found = model(pixel_values=images, **tokenizer(texts, padding=True, return_tensors="pt"))
    logits: Tensor = found.logits_per_image
    return logits


# Logits


def test_zero_shot_logits_are_those_of_transformers(clip_folder: Path, clip_scene: Callable[..., Any]) -> None:
    s = clip_scene("clip")
    expected = by_transformers(clip_folder, s.batch.image, [f"a photo of a {word}." for word in WORDS])
    assert expected.std(1).min() > 0.1  # the classes differ
    torch.testing.assert_close(s.forward().logits, expected, atol=1e-5, rtol=1e-5)
    features = s.model.read(s.batch.image)
    with torch.autocast("cpu", torch.bfloat16):
        half = s.model.head(features)
    assert half.dtype == torch.float32 and torch.equal(half, s.model.head(features))
    assert trained_tensors(s.model) == {} and (s.model.head.in_features, s.model.head.out_features) == (48, 3)


@pytest.mark.parametrize("prompt", ["a photo of a", "drawing"])
def test_vectors_of_written_words_give_the_written_prompts_logits(
    prompt: str, clip_folder: Path, clip_scene: Callable[..., Any]
) -> None:
    letters = len(prompt.replace(" ", ""))
    s = clip_scene("coop", hparams={"context": letters})
    expected = by_transformers(clip_folder, s.batch.image, [f"{prompt} {word}." for word in WORDS])
    sentences = s.model.head.sentences
    words = sentences.tower.model.embeddings.token_embedding.weight
    ids = sentences.tower.tokens([prompt])[0, 1:-1]
    assert len(ids) == letters
    with torch.no_grad():
        sentences.vectors.copy_(words[ids])
        torch.testing.assert_close(s.forward().logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(s.forward().logits, expected, atol=1e-5, rtol=1e-5)  # with gradients too


# What is computed, and what learns


def test_sentences_are_read_once_while_the_vectors_stay(clip_scene: Callable[..., Any]) -> None:
    _, model, batch = clip_scene("coop")
    calls: list[int] = []
    model.head.sentences.tower.register_forward_hook(lambda module, inputs, output: calls.append(1))
    features = model.read(batch.image)
    with torch.no_grad():
        first, again = model.classify(features).logits, model.classify(features).logits
    assert len(calls) == 1 and torch.equal(first, again)
    optimizer = torch.optim.Adam(trained_tensors(model).values(), lr=0.1)
    model.classify(features).logits.square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        moved = model.classify(features).logits
    assert len(calls) == 3 and not torch.allclose(moved, first, atol=1e-3)
    torch.testing.assert_close(moved, model.classify(features).logits.detach())


@pytest.mark.parametrize("tune", [None, "layernorm"])
def test_gradients_reach_the_vectors_and_what_is_tuned(tune: Any, clip_scene: Callable[..., Any]) -> None:
    s = clip_scene("coop", tune=tune)
    norms = {f"backbone.{name}" for name, _ in s.model.backbone.named_parameters() if "norm" in name}
    wanted = {VECTORS} | (norms if tune else set())
    assert s.reached(s.method.losses(s.forward(), s.batch)["main"]) == (wanted, set())
    assert set(trained_tensors(s.model)) == wanted


# Runs


def test_a_zero_shot_run_trains_nothing_and_predicts(
    clip_folder: Path, tiny_run: Callable[..., Any], image_folder: Path
) -> None:
    run = tiny_run("clip", backbone=str(clip_folder))
    first, *later = run.records("evaluation")
    assert later and all(record["validation"] == first["validation"] for record in later)
    assert all(record["train"]["main"] > 0 for record in (first, *later))
    for checkpoint in ("selected", "swad"):
        assert load_tensors(run.checkpoint(checkpoint))[0] == {}
    found = list(load_run(run.path).predict(sorted(image_folder.rglob("studio/*/00.png"))))
    assert len({tuple(p.probabilities) for p in found}) == 3


@pytest.mark.parametrize(("name", "settings"), [
    ("clip", {}), ("coop", {}), ("coop+sma", {"tune": "layernorm"}), ("clipood", {}),
    ("promptstyler", {"hparams": {"styles": 2, "style_steps": 2, "epochs": 2}}),
])  # fmt: skip
@pytest.mark.parametrize("with_backbone", [True, False])
def test_a_model_folder_keeps_the_sentences_and_no_text_tower(
    name: str, settings: dict[str, Any], with_backbone: bool, clip_folder: Path, tiny_settings: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    place = shutil.copytree(clip_folder, tmp_path / "clip")
    usual = {"steps": 2, "unseen": "none", "method": name, "backbone": str(place)}
    config = Config(**{**tiny_settings, **usual, **settings})
    fitted = fit(config, tmp_path / "runs", expecting=False, quiet=True)
    folder = write_model(tmp_path / "model", fitted, with_backbone=with_backbone)
    if with_backbone:
        shutil.rmtree(place)  # the folder is enough
    found = read_model(folder).predictor
    pixels = [np.full((56, 56, 3), value, np.uint8) for value in (10, 90, 200)]
    wanted = [one.probabilities for one in fitted.predictor.score(pixels)]
    np.testing.assert_allclose([one.probabilities for one in found.score(pixels)], wanted, atol=1e-6)
    assert not any(isinstance(module, TextTower) for module in found.model.modules())
    write_model(tmp_path / "again", read_model(folder), with_backbone=with_backbone)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


# Errors


@pytest.mark.parametrize("content", ["[" * 5000, "{}", "null", '{"model": 5}', "\x00"])
def test_a_tokenizer_of_others_that_is_none_is_refused_in_a_sentence(
    content: str, clip_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(clip_folder, tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="clip cannot be read as a complete CLIP"):
        load_text(load_backbone(str(tmp_path / "clip")))


def test_a_pipe_among_the_tokenizers_files_is_not_waited_for(clip_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(clip_folder, tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer_config.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "clip" / "tokenizer_config.json")
    with pytest.raises(ValueError, match="is a pipe or device"):
        load_text(load_backbone(str(tmp_path / "clip")))


def test_a_folder_without_text_tower_or_tokenizer_is_refused(
    clip_folder: Path, clip_scene: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import CLIPVisionModel

    shutil.copytree(clip_folder, tmp_path / "no-words", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match=r"no-words has no tokenizer: put CLIP's tokenizer\.json"):
        clip_scene("clip", backbone=str(tmp_path / "no-words"))
    CLIPVisionModel.from_pretrained(clip_folder).save_pretrained(tmp_path / "vision")
    for file in clip_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "vision")
    with pytest.raises(ValueError, match="vision (is not a complete CLIP|cannot be read as a complete CLIP)"):
        clip_scene("clip", backbone=str(tmp_path / "vision"))


def test_names_are_needed_and_may_not_be_too_long(clip_folder: Path) -> None:
    config = Config("photos", "site_c", image_size=56, method="coop", backbone=str(clip_folder))
    with pytest.raises(ValueError, match="'coop' needs `class_names`"):
        build_model(config, make_method(config), 3)
    method = make_method(config)
    method.class_names = ("a", "b" * 30)
    with pytest.raises(ValueError, match="at most 40 tokens; 'b+\\.' with 16 learned vectors has 49"):
        build_model(config, method, 2)

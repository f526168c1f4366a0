"""A model fitted on an encoder's folder needs neither the folder nor a hub afterwards."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.encoders import TIMM, TISSUE_PIXELS, write_timm
from patchgen.data.images import decode
from patchgen.data.table import read_table
from patchgen.fit.estimator import PatchGenClassifier
from patchgen.model import generic, weights
from patchgen.predict.predictor import load_predictor
from patchgen.runs.folder import RunFolder

SAID = TISSUE_PIXELS | {"interpolation": "bicubic", "license": "cc-by-nc-nd-4.0"}


def nowhere(*_: Any, **__: Any) -> Any:
    raise AssertionError("neither a hub nor timm may be asked")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospital") / "copied-encoder"
    write_timm(replace(TIMM["Virchow2"], width=64, depth=2), folder, {"pretrained_cfg": SAID})
    return folder


@pytest.fixture(scope="module")
def fitted(encoder: Path, image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PatchGenClassifier:
    runs = str(tmp_path_factory.mktemp("runs"))
    model = PatchGenClassifier(
        backbone=str(encoder), image_size=32, steps=2, eval_every=2, batch_per_domain=2, val_images=2, expect=False,
        quiet=True, runs=runs,
    )  # fmt: skip
    return model.fit(image_folder)


def test_the_run_records_its_pixels(fitted: PatchGenClassifier) -> None:
    about = json.loads((Path(fitted.run_) / "env.json").read_text())["backbone"]
    assert (about["mean"], about["std"]) == (TISSUE_PIXELS["mean"], TISSUE_PIXELS["std"])
    assert (about["interpolation"], about["assumed"]) == ("bicubic", "")
    assert RunFolder.open(fitted.run_).recorded_backbone() == about


def test_a_model_moves_without_its_encoder(
    fitted: PatchGenClassifier, encoder: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = read_table(image_folder)
    files = [table.file(i) for i in range(4)]
    before = fitted.predict_proba(files)
    folder = fitted.save(tmp_path / "model")
    moved = Path(shutil.move(folder, tmp_path / "elsewhere"))
    hidden = Path(shutil.move(encoder, tmp_path / "gone"))
    for name in ("hub_folder", "fetch", "cached_hub_folder"):
        monkeypatch.setattr(weights, name, nowhere)
    monkeypatch.setattr(generic, "import_timm", nowhere)
    try:
        model = PatchGenClassifier.load(moved)
        np.testing.assert_allclose(model.predict_proba(files), before, atol=1e-6)
        predictor = load_predictor(moved)
        assert predictor.interpolation == "bicubic" and predictor.model.backbone.licence == "cc-by-nc-nd-4.0"
        [scores] = predictor.score([decode(files[0], 32, "bicubic")])
        np.testing.assert_allclose(scores.probabilities, before[0], atol=1e-6)
        with pytest.raises((ValueError, OSError)):  # the run, unlike the model, needs the encoder
            load_predictor(fitted.run_)
    finally:
        shutil.move(hidden, encoder)
    assert str(encoder.parent) not in "".join(
        file.read_text() for file in moved.iterdir() if file.suffix != ".safetensors"
    )
    assert sum(name.startswith("model.backbone.") for name in load_file(moved / "model.safetensors")) > 30


def test_a_model_without_its_backbone_finds_the_folder_again(
    fitted: PatchGenClassifier, image_folder: Path, tmp_path: Path
) -> None:
    file = read_table(image_folder).file(0)
    folder = fitted.save(tmp_path / "small", with_backbone=False)
    np.testing.assert_allclose(PatchGenClassifier.load(folder).predict_proba([file]), fitted.predict_proba([file]))


def test_a_folder_of_an_earlier_version_is_read_as_bilinear(fitted: PatchGenClassifier, tmp_path: Path) -> None:
    folder = fitted.save(tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    for name in ("interpolation", "assumed"):
        del facts["backbone"][name]
    (folder / "config.json").write_text(json.dumps(facts))
    backbone = load_predictor(folder).model.backbone
    assert backbone.interpolation == "bilinear" and list(backbone.mean) == TISSUE_PIXELS["mean"]

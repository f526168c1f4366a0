"""`patchgen export`: the file answers as the model does, says how to use it, and is not left when it is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchgen.cli import main
from patchgen.predict import export as export_module
from patchgen.predict import runtime
from patchgen.predict.export import drawn_images, export
from patchgen.predict.predictor import Confidence, Predictor, load_predictor, load_run
from patchgen.runs.folder import RunFolder

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
pytest.importorskip("onnxscript", reason="the extra `export` is not installed")

MakeRun = Callable[..., RunFolder]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", params=["patchgen", "patchgen-select"])
def predictor(tiny_run: MakeRun, request: pytest.FixtureRequest) -> Predictor:
    found = load_predictor(tiny_run(request.param).path)
    found.confidence = Confidence(0.5)  # sharper: differences show
    return found


@pytest.fixture(scope="module")
def exported(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    differences = export(predictor, path, drawn_images(3, 56))
    assert set(differences) == {"probabilities", "mask"}
    assert all(one.value <= one.allowed <= 1e-4 for one in differences.values())
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]
    return path


def test_a_hundred_images_agree_at_any_batch_size(predictor: Predictor, exported: Path, image_folder: Path) -> None:
    files = sorted(image_folder.rglob("*.png"))
    images = [np.asarray(Image.open(f).convert("RGB").resize((56, 56), Image.Resampling.BILINEAR)) for f in files]
    images += drawn_images(10, 56)
    expected = predictor.score(images)
    session = onnxruntime.InferenceSession(exported)
    assert [i.name for i in session.get_inputs()] == ["pixels"]
    pixels = np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 255  # what the metadata says
    for batch in (1, 7, 100):
        parts = [session.run(["probabilities", "mask"], {"pixels": part})
                 for part in np.split(pixels, range(batch, 100, batch))]  # fmt: skip
        probabilities, mask = (np.concatenate(found) for found in zip(*parts, strict=True))
        assert probabilities.shape == (100, 3) and mask.shape == (100, 4, 4)
        assert np.abs(probabilities - np.stack([e.probabilities for e in expected])).max() <= 1e-4
        assert np.abs(mask - np.stack([e.mask for e in expected])).max() <= 1e-4  # type: ignore[type-var]


def test_the_file_says_how_to_use_it(exported: Path) -> None:
    facts = onnxruntime.InferenceSession(exported).get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == ["circle", "cross", "square"] and facts["image_size"] == "56"
    assert "divided by 255" in facts["preprocessing"] and float(facts["temperature"]) == 0.5
    assert "not an annotation" in facts["mask"] and facts["backbone_licence"] == "none"


def test_a_baseline_has_no_mask(tiny_run: MakeRun, image_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    target, run = tmp_path / "lp.onnx", str(tiny_run("lp-ln").path)
    images = str(image_folder / "studio")
    assert main(["export", run, "--out", str(target), "--images", images, "--count", "4"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "converting the model, then comparing outputs on 4 images\n" in err
    assert lines[0].startswith("probabilities: largest difference") and "on 4 images" in lines[0] and len(lines) == 2
    assert lines[-1] == str(target)
    assert [o.name for o in onnxruntime.InferenceSession(target).get_outputs()] == ["probabilities"]


def test_a_file_that_answers_otherwise_is_not_left(
    tiny_run: MakeRun, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "write_graph", lambda *words: shutil.copy(exported, words[-1]))
    (tmp_path / "model.onnx").write_text("an older file")
    with pytest.raises(ValueError, match="differ from the model's .probabilities by .*, allowed"):  # by temperature
        export(load_predictor(tiny_run().path), tmp_path / "model.onnx", drawn_images(2, 56))
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "an older file"


def test_what_is_allowed_is_the_networks_own_rounding(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    images = drawn_images(1, 56)
    noise = export_module._float32_noise(predictor, images)
    assert set(noise) == {"probabilities", "mask"} and all(1e-9 < value < 1e-5 for value in noise.values())
    assert next(predictor.model.parameters()).dtype == torch.float32
    [truth] = predictor.score(images)

    def verified(gap: float, rounding: float) -> float:
        monkeypatch.setattr(export_module, "_float32_noise", lambda *_: {"mask": rounding})
        outputs = {"mask": truth.mask[None] + gap}
        return export_module._verified(predictor, images, lambda _: outputs, "it")["mask"].allowed

    assert verified(1e-4, 1e-5) == 2e-4
    for gap, rounding in ((1e-3, 1e-5), (0.02, 1.0), (float("nan"), 0.0)):  # never a percent, and nan is far
        with pytest.raises(ValueError, match="outputs of it differ from the model's .mask by"):
            verified(gap, rounding)


def test_the_model_stays_what_it_was(predictor: Predictor, exported: Path, tiny_run: MakeRun) -> None:
    fresh = load_run(tiny_run(predictor.config.method).path)
    for (name, a), (_, b) in zip(predictor.model.named_parameters(), fresh.model.named_parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad, name
    assert not predictor.model.training


def test_a_missing_extra_is_named(
    tiny_run: MakeRun, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(tiny_run().path)
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    assert main(["export", run, "--out", str(tmp_path / "x.onnx")]) == 2
    assert "pip install 'patchgen[export]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

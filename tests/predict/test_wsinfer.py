"""`patchgen export --format wsinfer`: TorchScript and config.json, used as WSInfer uses them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchgen.cli import main
from patchgen.predict.export import drawn_images, export_wsinfer
from patchgen.predict.predictor import Confidence, Predictor, load_predictor
from patchgen.runs.folder import RunFolder

Captured = pytest.CaptureFixture[str]
REQUIRED = {"spec_version", "architecture", "num_classes", "patch_size_pixels", "spacing_um_px", "class_names",
            "transform"}  # fmt: skip


@pytest.fixture(scope="module", params=["patchgen-select", "lp-ln"])
def predictor(tiny_run: Callable[..., RunFolder], request: pytest.FixtureRequest) -> Predictor:
    found = load_predictor(tiny_run(request.param).path)
    found.confidence = Confidence(0.5)
    return found


def test_a_reader_that_follows_the_config_gets_the_models_answers(
    predictor: Predictor, image_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    assert export_wsinfer(predictor, out, drawn_images(3, 56), spacing=0.5, patch=40)["probabilities"].value <= 1e-4
    assert {path.name for path in out.iterdir()} == {"torchscript_model.pt", "config.json"}
    config = json.loads((out / "config.json").read_text())
    assert set(config) == REQUIRED and config["spec_version"] == "1.0"
    assert (config["num_classes"], config["class_names"]) == (3, ["circle", "cross", "square"])
    assert (config["patch_size_pixels"], config["spacing_um_px"]) == (40, 0.5)
    resize, to_tensor, normalize = config["transform"]
    assert (resize["name"], to_tensor, normalize["name"]) == ("Resize", {"name": "ToTensor"}, "Normalize")
    model = torch.jit.load(str(out / "torchscript_model.pt")).eval()
    files = sorted(image_folder.rglob("*.png"))[::9]
    side = resize["arguments"]["size"]
    inputs = []
    for file in files:
        image = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        mean, std = (torch.tensor(normalize["arguments"][name]).view(3, 1, 1) for name in ("mean", "std"))
        inputs.append((pixels - mean) / std)
    with torch.no_grad():
        found = model(torch.stack(inputs)).softmax(1).numpy()
    expected = np.stack([one.probabilities for one in predictor.predict(files)])  # type: ignore[union-attr]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_command(tiny_run: Callable[..., RunFolder], tmp_path: Path, capsys: Captured) -> None:
    run, out = str(tiny_run("lp-ln").path), tmp_path / "model"
    words = ["export", run, "--format", "wsinfer", "--count", "2", "--out", str(out)]
    assert main([*words, "--spacing", "0.5"]) == 0
    assert "largest difference" in capsys.readouterr().out and (out / "config.json").is_file()
    assert json.loads((out / "config.json").read_text())["patch_size_pixels"] == 56
    assert main([*words, "--spacing", "0.25"]) == 0  # an earlier export is replaced
    for wrong, text in (
        ([*words[:-1], str(tmp_path / "new")], "needs --spacing"),
        ([*words[:-1], str(tmp_path), "--spacing", "0.5"], "is not empty (it holds model)"),
        ([*words, "--spacing", "0.5", "--patch", "0"], "--patch must be at least 1"),
        (
            ["export", run, "--out", str(tmp_path / "x.onnx"), "--spacing", "1"],
            "--spacing and --patch are for --format wsinfer",
        ),
    ):
        assert main(wrong) == 2 and text in capsys.readouterr().err

"""Any run on images: the recorded scores come out again, broken things are named, pictures are honest."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from patchgen.data.images import decode
from patchgen.draw.overlay import LONGEST, OPACITY, Explanation, _scale, original, upsample
from patchgen.predict.attribution import RANKINGS
from patchgen.predict.discover import read_features
from patchgen.predict.embed import embed
from patchgen.predict.export import export
from patchgen.predict.predictor import NOT_FINITE, Outputs, Prediction, Predictor, Unreadable, identity, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors, save_tensors

MakeRun = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def predictor(tiny_run: MakeRun) -> Predictor:
    return load_run(tiny_run().path)


@pytest.fixture
def copied(tiny_run: MakeRun, tmp_path: Path) -> RunFolder:
    """A run that a test may break."""
    return RunFolder(shutil.copytree(tiny_run().path, tmp_path / "run"))


@pytest.fixture(scope="module")
def files(image_folder: Path) -> list[Path]:
    return sorted((image_folder / "studio").rglob("*.png"))


# Predictions


@pytest.mark.parametrize(
    ("method", "checkpoint"), [("lp", "selected"), ("full", "swad"), ("patchgen", "selected"), ("patchgen", "swad")]
)
def test_recorded_accuracy_comes_out_again(tiny_run: MakeRun, files: list[Path], method: str, checkpoint: Any) -> None:
    run = tiny_run(method)
    record = next(r for r in run.records("test") if r["checkpoint"] == checkpoint)
    found = [p for p in load_run(run.path, checkpoint).predict(files) if isinstance(p, Prediction)]
    assert len(found) == len(files)
    assert np.mean([p.label == p.path.parent.name for p in found]) == pytest.approx(record["all"]["accuracy"])
    if method == "patchgen":
        assert np.mean([p.mask.mean() for p in found]) == pytest.approx(record["mask"]["mean"], abs=1e-4)
    else:
        assert all(p.mask is None for p in found)


def test_one_image_equals_the_obvious_computation(predictor: Predictor, files: list[Path]) -> None:
    [found] = predictor.predict(files[:1])
    assert isinstance(found, Prediction)
    pixels = np.asarray(Image.open(files[0]).convert("RGB").resize((56, 56), Image.Resampling.BILINEAR)) / 255
    backbone = predictor.model.backbone
    image = torch.tensor((pixels - np.array(backbone.mean)) / np.array(backbone.std)).permute(2, 0, 1).float()
    with torch.no_grad():
        out = predictor.model(image[None])
    expected = torch.softmax(out.logits[0], 0).numpy()
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)
    np.testing.assert_allclose(found.mask, out.mask[0].reshape(4, 4).numpy(), atol=1e-5)
    assert (found.label, found.confidence) == (predictor.classes[expected.argmax()], found.probabilities.max())


def test_batches_keep_order_and_broken_files_keep_their_place(
    predictor: Predictor, files: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(files[0].read_bytes()[:200])
    paths = [broken, files[0], tmp_path / "missing.png", files[1], files[2], broken, broken]
    whole = list(predictor.predict(paths, batch=64))
    for wrong, message in (({"paths": [], "batch": 0}, "at least 1"), ({"paths": "photo.png"}, r"put it in \[...\]")):
        with pytest.raises(ValueError, match=message):
            list(predictor.predict(**wrong))  # type: ignore[arg-type]
    counts: list[int] = []
    stream = predictor.predict(paths, batch=2, tick=counts.append)
    parts = [next(stream)]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # the caller's mode is its own
    parts += stream
    assert [type(p) for p in parts] == [Unreadable, Prediction, Unreadable, Prediction, Prediction, *[Unreadable] * 2]
    assert [p.path for p in parts] == paths == [p.path for p in whole]
    assert counts == [2, 2, 2, 1]
    assert "FileNotFoundError" in parts[2].reason
    for a, b in zip(whole, parts, strict=True):
        if isinstance(a, Prediction):
            np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-5)


@pytest.mark.parametrize("damage", ["weights", "eps", "nan_eps"])
def test_outputs_that_are_not_finite_are_errors(
    tiny_run: MakeRun, files: list[Path], damage: str, tmp_path: Path
) -> None:
    predictor = load_run(tiny_run().path)
    if damage == "weights":
        for parameter in predictor.model.parameters():
            parameter.data.fill_(1e38)
    else:
        for part in predictor.model.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.eps = -1.0 if damage == "eps" else float("nan")
    found = list(predictor.predict(files[:3]))
    assert [one.reason for one in found if isinstance(one, Unreadable)] == [NOT_FINITE] * 3
    assert not read_features(predictor, files[:3]).predictions
    assert len(embed(predictor, files[:3], ("features", "cls")).failed) == 3
    pixels = [decode(file, 56) for file in files[:3]]
    with pytest.raises(ValueError, match="not finite"):  # slides and the viewer
        predictor.score(pixels)
    with pytest.raises(ValueError, match="not finite"):
        predictor.explain(files[0])
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    with pytest.raises(ValueError, match="not finite"):
        export(predictor, tmp_path / "a.onnx", pixels)


def test_one_broken_output_costs_one_image(
    predictor: Predictor, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(images: Any, plain: Any = predictor.outputs) -> Outputs:
        out = plain(images)
        out.mask[1, 0, 0] = np.nan
        return out

    expected = list(predictor.predict(files[:3]))
    monkeypatch.setattr(predictor, "outputs", spoiled)
    found = list(predictor.predict(files[:3]))
    assert isinstance(found[1], Unreadable)
    np.testing.assert_array_equal(found[2].probabilities, expected[2].probabilities)


# Broken runs


def rewrite(run: RunFolder, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    tensors, facts = load_tensors(run.checkpoint("selected"))
    change(tensors, facts)
    save_tensors(run.checkpoint("selected"), tensors, facts)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t, f: f["backbone"].update(digest="0" * 64), "trained with backbone 000"),
    (lambda t, f: f.update(pool="mean"), "pool mean"),
    (lambda t, f: f.update(grid=[2, 8]), "grid"),
    (lambda t, f: f.pop("classes"), "name each class once"),
    (lambda t, f: f.update(classes=["circle", "circle", "cross"]), "name each class once"),
    (lambda t, f: f["classes"].append("star"), "head"),
    (lambda t, f: t["head.weight"].fill_(float("nan")), "head.weight holds values that are not finite"),
    (lambda t, f: t.pop("head.bias"), "head.bias"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_belong_is_named(copied: RunFolder, change: Any, message: str) -> None:
    rewrite(copied, change)
    with pytest.raises(ValueError, match=message):
        load_run(copied.path)


def test_missing_things_are_named(copied: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run folder"):
        load_run(tmp_path)
    copied.checkpoint("swad").unlink()
    with pytest.raises(ValueError, match="no checkpoint 'swad', which needs a finished run trained with --swad"):
        load_run(copied.path, "swad")
    copied.checkpoint("selected").write_bytes(b"junk")
    with pytest.raises(ValueError, match="damaged"):
        load_run(copied.path)


def test_what_predictions_depend_on_is_in_the_identity(copied: RunFolder) -> None:
    before = identity(copied.path)
    rewrite(copied, lambda tensors, _: tensors["head.bias"].add_(1))
    weights = identity(copied.path)
    (copied.path / "config.yaml").write_text((copied.path / "config.yaml").read_text() + "\n")
    assert len({before, weights, identity(copied.path), identity(copied.path, "swad")}) == 4


# Explanations


def test_an_explanation_agrees_with_the_prediction(predictor: Predictor, files: list[Path]) -> None:
    [expected] = predictor.predict(files[:1])
    found = predictor.explain(files[0])
    assert isinstance(expected, Prediction)
    assert found.image.shape == (56, 56, 3) and found.image.dtype == np.uint8
    np.testing.assert_allclose(found.mask, expected.mask, atol=1e-6)
    assert found.top[0] == (expected.label, pytest.approx(expected.confidence, abs=1e-6))
    assert [p for _, p in found.top] == sorted((p for _, p in found.top), reverse=True)
    assert {name for name, _ in found.top} == set(predictor.classes)


@pytest.mark.parametrize(("how", "kind"), [("auto", "Grad-CAM"), ("rollout", "attention rollout")])
def test_a_method_without_mask_is_explained_afterwards(
    tiny_run: MakeRun, files: list[Path], how: Any, kind: str
) -> None:
    predictor = load_run(tiny_run("lp-ln").path)
    found = predictor.explain(files[0], how)
    inputs = predictor.inputs([found.image])
    target = torch.tensor([predictor.classes.index(found.top[0][0])])
    scores = RANKINGS["grad-cam" if how == "auto" else how](predictor.model, inputs, target)[0].numpy()
    scores = np.maximum(scores, 0) if how == "auto" else scores - scores.min()
    np.testing.assert_allclose(found.mask.ravel(), scores / scores.max(), atol=1e-5)
    assert found.kind == kind and kind in found.reading and "not a selection" in found.notice
    assert found.overlay().mode == "RGB"
    with pytest.raises(ValueError, match="has no ranking 'mask'"):
        predictor.explain(files[0], "mask")
    with pytest.raises(ValueError, match="cannot read image"):
        predictor.explain(files[0] / "none.png")


# Pictures


def gray_photo(folder: Path, size: tuple[int, int] = (60, 60)) -> Path:
    path = folder / "gray.png"
    Image.new("RGB", size, (128, 128, 128)).save(path)
    return path


def explanation(path: Path, mask: np.ndarray, label: str = "cat") -> Explanation:
    return Explanation(path, np.zeros((8, 8, 3), np.uint8), mask.astype(np.float32), ((label, 0.75), ("dog", 0.25)))


def panel_colours(picture: Image.Image) -> np.ndarray:
    """Pixels (N, 3) well inside the right panel."""
    pixels = np.asarray(picture).astype(float)
    height, width = pixels.shape[:2]
    return pixels[int(height * 0.3) : int(height * 0.7), int(width * 0.55) : int(width * 0.8)].reshape(-1, 3)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_the_colour_tells_the_absolute_value(tmp_path: Path, value: float) -> None:
    picture = explanation(gray_photo(tmp_path), np.full((4, 4), value)).overlay()
    colour = 255 * np.array(matplotlib.colormaps["viridis"](value)[:3])
    expected = OPACITY * colour + (1 - OPACITY) * 128
    assert np.abs(panel_colours(picture) - expected).max() < 3


def test_a_nearly_saturated_mask_looks_saturated_unless_asked(tmp_path: Path) -> None:
    mask = np.linspace(0.97, 1.0, 16).reshape(4, 4)
    found = explanation(gray_photo(tmp_path), mask)
    plain, stretched = (np.ptp(panel_colours(found.overlay(relative=r)), axis=0).max() for r in (False, True))
    assert plain < 15 and stretched > 60
    assert "RELATIVE" in _scale(mask, True)[2] and "RELATIVE" not in _scale(mask, False)[2]
    assert _scale(mask, True)[:2] == (mask.min(), mask.max())
    constant = _scale(np.full((2, 2), 0.3), True)
    assert constant[:2] == (0.0, 1.0) and "not stretched" in constant[2]


def test_the_picture_shows_where(tmp_path: Path) -> None:
    mask = np.zeros((4, 4))
    mask[0, 3] = 1  # first row, last column
    grown = upsample(mask, 40, 80)
    assert grown.shape == (40, 80) and grown.min() >= 0 and grown.max() <= 1
    row, column = np.unravel_index(grown.argmax(), grown.shape)
    assert row < 10 and column >= 60
    np.testing.assert_array_equal(grown, np.kron(mask, np.ones((10, 20))))  # a patch has one value, in every picture
    np.testing.assert_array_equal(upsample(np.full((3, 3), 0.7, np.float32), 20, 30), np.float32(0.7))


def test_the_original_is_upright_and_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    pixels = np.zeros((300, 1500, 3), np.uint8)
    pixels[:, :750] = 255  # white left half
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise: the left half comes to the top
    Image.fromarray(pixels).save(path, exif=exif)
    shown = original(path)
    assert shown.shape[0] == LONGEST and shown.shape[1] == pytest.approx(LONGEST / 5, abs=2)
    assert shown[: LONGEST // 2 - 20].mean() > 245 and shown[LONGEST // 2 + 20 :].mean() < 10
    assert original(gray_photo(tmp_path, (30, 20))).shape == (20, 30, 3)


def test_the_outline_follows_the_threshold(tmp_path: Path) -> None:
    found = explanation(gray_photo(tmp_path), np.array([[0.1, 0.9], [0.1, 0.9]]))
    plain, outlined = (np.asarray(found.overlay(t)).astype(int) for t in (None, 0.5))
    rows = slice(len(plain) // 3, 2 * len(plain) // 3)  # inside the panels, away from the title
    columns = np.flatnonzero(np.abs(plain - outlined)[rows].max((0, 2)) > 40)
    assert 0 < len(columns) == np.ptp(columns) + 1 < 20  # one upright line
    assert 0.6 < columns.mean() / plain.shape[1] < 0.75  # in the middle of the right panel
    with pytest.raises(ValueError, match="between 0 and 1"):
        found.overlay(1.5)


def test_colour_map_and_opacity_are_the_callers_choice() -> None:
    gray = np.full((64, 64, 3), 128, np.uint8)
    found = Explanation(None, gray, np.ones((4, 4), np.float32), (("a", 1.0),))
    assert np.allclose(panel_colours(found.overlay(colours="gray", opacity=1.0)), 255, atol=3)
    assert np.allclose(panel_colours(found.overlay(colours="gray", opacity=0.0)), 128, atol=3)
    with pytest.raises(ValueError, match="no colour map 'viridsi'; did you mean 'viridis'"):
        found.overlay(colours="viridsi")
    with pytest.raises(ValueError, match="opacity is a share from 0 to 1, not 2"):
        found.overlay(opacity=2)

"""`patchgen embed`: the vectors that the model has, with the names of their images."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from patchgen.cli import main
from patchgen.data.images import decode
from patchgen.diagnose import geometry
from patchgen.diagnose.geometry import pca, unit_length
from patchgen.predict import embed
from patchgen.predict.predictor import load_run
from patchgen.runs.folder import RunFolder

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tiny_run: Callable[..., RunFolder]) -> str:
    return str(tiny_run().path)


def test_a_folder_of_domains_becomes_rows_with_names(run: str, image_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.npz"
    assert main(["embed", run, str(image_folder), "--out", str(file), "--what", "features", "cls", "mean"]) == 0
    found = np.load(file, allow_pickle=False)
    assert set(found) == {"path", "domain", "label", "features", "cls", "mean"}
    assert all((found[name].shape, found[name].dtype) == ((90, 64), np.float32) for name in ("features", "cls", "mean"))
    predictor = load_run(run)
    for row in (0, 57, 89):
        image = Path(str(found["path"][row]))
        assert image.parts[-3:-1] == (found["domain"][row], found["label"][row])
        inputs = predictor.inputs([decode(image, predictor.config.image_size)])
        with torch.no_grad():
            tokens, out = predictor.model.backbone(inputs), predictor.model(inputs)
        for name, vector in (("features", out.features), ("cls", tokens.cls), ("mean", tokens.patches.mean(1))):
            np.testing.assert_allclose(found[name][row], vector[0], atol=1e-4)


def test_parquet_has_the_same_with_coordinates(run: str, image_folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    words = ["embed", run, str(image_folder / "studio"), "--coordinates", "pca", "--out"]
    for ending in ("parquet", "npz"):
        assert main([*words, str(tmp_path / f"studio.{ending}")]) == 0
    table, arrays = parquet.read_table(tmp_path / "studio.parquet"), np.load(tmp_path / "studio.npz")
    assert table.column_names == ["path", "features", "x", "y"] == list(arrays)  # a domain alone has no layout
    assert table.column("path").to_pylist() == arrays["path"].tolist()
    np.testing.assert_array_equal(np.stack(table.column("features").to_numpy()), arrays["features"])
    np.testing.assert_allclose(arrays["x"], pca(unit_length(arrays["features"]))[:, 0], atol=1e-4)


def test_what_cannot_be_read_is_left_out_and_named(
    run: str, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copy(image_folder / "studio/cross/00.png", tmp_path / "b.png")
    (tmp_path / "a.png").write_bytes(b"not an image")
    words = ["embed", run, str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--out", str(tmp_path / "two.npz")]
    assert main(words) == 0
    assert "1 of 2 images could not be read" in capsys.readouterr().err
    found = np.load(tmp_path / "two.npz")
    assert found["path"].tolist() == [str(tmp_path / "b.png")] and len(found["features"]) == 1
    assert main([*words, "--strict"]) == 1
    assert main(["embed", run, str(tmp_path / "a.png"), "--out", str(tmp_path / "none.npz")]) == 1
    assert not (tmp_path / "none.npz").exists()


def test_missing_extras_are_named_before_the_work(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    assert main(["embed", run, str(tmp_path), "--out", str(tmp_path / "x.parquet")]) == 2
    assert "pip install 'patchgen[parquet]'" in capsys.readouterr().err
    monkeypatch.setattr(geometry, "find_spec", lambda name: None)
    assert main(["embed", run, str(tmp_path), "--out", str(tmp_path / "x.npz"), "--coordinates", "umap"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'patchgen[plots]'" in error and "embedding" not in error


def test_a_bare_encoder(image_folder: Path, tmp_path: Path) -> None:
    """A name or a folder of transformers, as its own class token and mean patch."""
    from patchgen.data.augment import normalize
    from patchgen.model.backbone import load_backbone

    photos, target = image_folder / "studio" / "cross", tmp_path / "tiny.npz"
    words = [str(photos), "--out", str(target), "--image-size", "56", "--what", "features", "cls", "mean"]
    assert main(["embed", "tiny", *words]) == 0
    found = np.load(target, allow_pickle=False)
    backbone = load_backbone("tiny")
    pixels = torch.stack([torch.from_numpy(decode(path, 56)) for path in map(str, found["path"])])
    with torch.no_grad():
        tokens = backbone(normalize(pixels.permute(0, 3, 1, 2).float() / 255, backbone.mean, backbone.std))
    np.testing.assert_allclose(found["cls"], tokens.cls, atol=1e-4)
    np.testing.assert_allclose(found["mean"], tokens.patches.mean(1), atol=1e-4)
    np.testing.assert_array_equal(found["features"], found["cls"])

"""Stain normalisation against tiles whose stains and amounts are known, and the same pixels in training and in use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("torchstain")
from patchgen.config import Config  # noqa: E402
from patchgen.data.stain import Macenko, fit_macenko, is_stained, read_macenko  # noqa: E402


def unit(*columns: tuple[float, float, float]) -> np.ndarray:
    stains = np.array(columns).T
    return stains / np.linalg.norm(stains, axis=0)


HERE = unit((0.65, 0.70, 0.29), (0.27, 0.80, 0.53))  # haematoxylin and eosin of one laboratory
THERE = unit((0.50, 0.70, 0.50), (0.35, 0.90, 0.25))  # and of another


def tile(stains: np.ndarray, seed: int, strength: float = 1.0, size: int = 56) -> np.ndarray:
    """Light of 240 through random amounts of two stains; a third of the pixels has one stain, a third the other."""
    rng = np.random.default_rng(seed)
    amounts = strength * rng.gamma(2, 0.3, (2, size * size))
    kind = rng.integers(0, 3, size * size)
    amounts[0, kind == 1] = amounts[1, kind == 2] = 0
    light = 240 * np.exp(-stains @ amounts)
    return light.clip(0, 255).round().astype(np.uint8).T.reshape(size, size, 3)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(float) - other.astype(float)).mean())


def test_the_stains_that_tiles_were_made_of_are_found() -> None:
    reference = fit_macenko([tile(HERE, seed) for seed in range(7)])
    np.testing.assert_allclose(np.array(reference.stains), HERE, atol=0.03)
    strong = fit_macenko([tile(HERE, seed, strength=1.5) for seed in range(7)])
    np.testing.assert_allclose(np.array(strong.strengths) / reference.strengths, 1.5, rtol=0.03)


def test_the_same_tissue_stained_elsewhere_becomes_the_same_tile() -> None:
    reference = fit_macenko([tile(HERE, seed) for seed in range(7)])
    own, foreign = tile(HERE, 99), tile(THERE, 99, strength=0.6)  # the same amounts, other colours and strength
    assert apart(own, foreign) > 15
    assert apart(own, reference(foreign)) < 5 and apart(own, reference(own)) < 4
    assert reference(foreign).shape == foreign.shape and reference(foreign).dtype == np.uint8


def test_one_odd_tile_does_not_decide_the_reference() -> None:
    tiles = [tile(HERE, seed) for seed in range(7)]
    plain, mixed = fit_macenko(tiles), fit_macenko([*tiles, tile(THERE, 8, strength=2)])
    np.testing.assert_allclose(np.array(mixed.stains), np.array(plain.stains), atol=0.01)


def test_glass_stays_as_it_is_and_cannot_be_fitted() -> None:
    glass = np.full((40, 40, 3), 243, np.uint8)
    assert not is_stained(glass) and Macenko(((0.6, 0.2), (0.7, 0.8), (0.4, 0.5)), (1.9, 1.0))(glass) is glass
    with pytest.raises(ValueError, match="--stain macenko: no training image is stained"):
        fit_macenko([glass])


def test_a_reference_survives_json_and_a_damaged_one_is_refused() -> None:
    reference = fit_macenko([tile(HERE, 1)])
    facts = json.loads(json.dumps(reference.facts()))
    assert read_macenko(facts, "x") == reference
    for wrong in (None, [], {}, {**facts, "stains": [1]}, {**facts, "strengths": [0, 1]}, {**facts, "kind": "other"},
                  {**facts, "stains": [[9, 9], [9, 9], [9, 9]]}):  # fmt: skip
        with pytest.raises(ValueError, match="x.* stain reference"):
            read_macenko(wrong, "x")


@pytest.fixture(scope="module")
def stained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two laboratories and a third that is left out; the class is the strength of haematoxylin."""
    root = tmp_path_factory.mktemp("stained") / "tiles"
    for site, stains in {"here": HERE, "there": THERE, "unseen": unit((0.1, 0.2, 0.97), (0.9, 0.4, 0.1))}.items():
        for kind, strength in {"pale": 0.5, "dark": 1.3}.items():
            (root / site / kind).mkdir(parents=True)
            for i in range(6):
                Image.fromarray(tile(stains, i, strength, 28)).save(root / site / kind / f"{i}.png")
    return root


def test_training_and_use_see_the_same_pixels(
    stained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchgen.data.images import ImageStore, decode
    from patchgen.fit.procedure import fit, predictions_at
    from patchgen.predict.export import export
    from patchgen.predict.model_folder import read_model, write_model
    from patchgen.predict.predictor import load_run
    from patchgen.runs.folder import RunFolder
    from patchgen.tasks import make_fold

    trained: list[np.ndarray] = []
    load = ImageStore.load

    def watched(store: ImageStore, rows: Any) -> Any:
        pixels = load(store, rows)
        trained.extend(pixels.numpy() if store.stain else [])
        return pixels

    monkeypatch.setattr(ImageStore, "load", watched)
    config = Config(str(stained_folder), "unseen", method="lp-ln", backbone="tiny", image_size=28, steps=3,
                    eval_every=2, batch_per_domain=4, stain="macenko")  # fmt: skip
    model = fit(config, tmp_path / "runs", quiet=True)
    run = tmp_path / "runs" / model.about["run"]
    reference = load_run(run).stain
    assert reference is not None and len(trained) > 24
    # fitted on the training images of the two seen sites: far from the unseen laboratory's yellow and red
    assert np.abs(np.array(reference.stains)[:, 0] - (0.1, 0.2, 0.97)).max() > 0.3

    folder = write_model(tmp_path / "model", model)
    read = read_model(folder).predictor
    assert read.stain == reference == model.predictor.stain and "Macenko" in (folder / "README.md").read_text()
    files = sorted(stained_folder.glob("*/*/*.png"))
    seen = {pixels.tobytes() for pixels in trained}
    in_use = (255 * read.pixels([decode(file, 28) for file in files])).round().byte().cpu().numpy()
    assert {one.tobytes() for one in in_use} == seen  # every image, bit by bit
    before = [found.probabilities for found in model.predictor.predict(files)]  # type: ignore[union-attr]
    after = [found.probabilities for found in read.predict(files)]  # type: ignore[union-attr]
    np.testing.assert_allclose(before, after, atol=1e-6)
    pytest.importorskip("onnx")
    with pytest.raises(ValueError, match="normalises stains"):
        export(read, tmp_path / "m.onnx", [decode(files[0], 28)])
    trained.clear()  # methods are compared on the images that their runs were trained to read
    (run / "selected_predictions.safetensors").unlink()  # as an earlier version left it
    predictions_at(RunFolder.open(run), make_fold(config), "selected")
    own = [one for one, file in zip(in_use, files, strict=True) if file.parent.parent.name == "unseen"]
    assert {one.tobytes() for one in trained} == {one.tobytes() for one in own}


def test_a_checkpoint_without_its_reference_is_refused(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    import shutil

    from patchgen.predict.predictor import load_run

    run = shutil.copytree(tiny_run("lp-ln").path, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("stain: none", "stain: macenko"))
    with pytest.raises(ValueError, match="no usable stain reference"):
        load_run(run)

"""Models remember the scale of their training tiles; masks, plug-ins, patients and vectors of slides."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.common import plugins

pytest.importorskip("openslide")
pytest.importorskip("shapely")

from patchgen.slides.cohort import Rates, rates  # noqa: E402
from patchgen.slides.slide import Slide  # noqa: E402
from patchgen.slides.tissue import TISSUE  # noqa: E402

from .cohort import COLUMNS, ROWS, TILE, feature, ring, rows_of, undrawn  # noqa: E402

MPP = 1.0  # half the resolution of the slides: a tile of TILE pixels is 2 x 2 of those in `cohort.py`


@pytest.fixture(scope="module")
def model(cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("scale")
    drawn = [feature("stroma", "Polygon", [ring(0, 0, 6, 8)]), feature("tumour", "Polygon", [ring(6, 0, 12, 8)])]
    for name in ("a1", "a2", "b1", "b2"):
        (out / f"{name}.geojson").write_text(json.dumps(drawn))
    words = ["--annotations", str(out), "--out", f"{out}/t", "--mpp", str(MPP), "--tile", str(TILE)]
    assert main(["slide", "tiles", str(cohort / "slides"), *words]) == 0
    words = ["fit", f"{out}/t/manifest.csv", "--out", f"{out}/model", "--runs", f"{out}/runs", "--no-expect"]
    tiny = ["--backbone", "tiny", "--image-size", "28", "--steps", "2", "--eval-every", "1", "--method", "lp"]
    assert main([*words, *tiny]) == 0
    with undrawn():
        yield out / "model"


def read_areas(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], np.ndarray]:
    """The pixels of all tiles that are read from now on, at 28 pixels, by their corner."""
    areas: dict[tuple[int, int], np.ndarray] = {}
    read = Slide.read

    def watched(self: Slide, corner: Any, extent: Any, size: Any, *more: Any) -> np.ndarray:
        pixels = read(self, corner, extent, size, *more)
        if size == (28, 28):
            areas[round(corner[0]), round(corner[1])] = pixels
        return pixels

    monkeypatch.setattr(Slide, "read", watched)
    return areas


def test_a_slide_is_read_at_the_scale_of_training(
    cohort: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By pixels: what the model reads from the slide is what was written as its training tile, resized."""
    assert json.loads((model / "config.json").read_text())["tiles"] == {"mpp": MPP, "side": TILE}
    slide, areas = str(cohort / "slides" / "site_a" / "a1.tif"), read_areas(monkeypatch)
    assert main(["slide", str(model), slide, "--out", str(tmp_path / "maps")]) == 0
    assert "WARNING" not in capsys.readouterr().err
    facts = json.loads((tmp_path / "maps" / "a1" / "slide.json").read_text())
    assert (facts["mpp"], facts["tile"]) == (MPP, TILE)
    rows = rows_of(tmp_path / "maps" / "a1" / "tiles.csv")
    places = {(int(row["x"]), int(row["y"])): row["width"] for row in rows}
    assert places.keys() == areas.keys() and set(places.values()) == {str(2 * TILE)}
    same = 0
    for (x, y), pixels in areas.items():
        tile = model.parent / "t" / "images" / "site_a" / "a1" / f"x{x}_y{y}.png"
        if tile.is_file():
            small = Image.open(tile).resize((28, 28), Image.Resampling.BOX)  # as the slide's levels are made
            assert np.abs(np.asarray(small).astype(float) - pixels).max() <= 2
            same += 1
    assert same >= 6


def test_another_scale_is_warned_of_and_an_unknown_one_refused(
    cohort: Path, model: Path, tiny_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slide = str(cohort / "slides" / "site_a" / "a1.tif")
    assert main(["slide", str(model), slide, "--out", str(tmp_path / "o"), "--mpp", "0.5"]) == 0
    said = capsys.readouterr().err
    assert "WARNING: tiles of 56 pixels at 0.5 microns per pixel, but" in said and "56 pixels at 1 microns" in said
    for given in ([], ["--mpp", "0.5"], ["--tile", "56"]):
        assert main(["slide", str(tiny_run().path), slide, "--out", str(tmp_path / "p"), *given]) == 2
        assert "give --mpp" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_wsinfer_takes_the_scale_from_the_model(model: Path, tmp_path: Path) -> None:
    words = ["export", str(model), "--format", "wsinfer", "--count", "2", "--out", str(tmp_path / "w")]
    assert main(words) == 0
    facts = json.loads((tmp_path / "w" / "config.json").read_text())
    assert (facts["spacing_um_px"], facts["patch_size_pixels"]) == (MPP, TILE)


@pytest.mark.parametrize("kind", ["png", "geojson"])
def test_the_users_mask_decides(cohort: Path, model: Path, tmp_path: Path, kind: str) -> None:
    """A rectangle of 2 x 1 tiles of the model, part of which is glass."""
    (tmp_path / "masks").mkdir()
    if kind == "png":
        mask = np.zeros((ROWS * 10, COLUMNS * 10), np.uint8)
        mask[:20, :40] = 1
        Image.fromarray(mask).save(tmp_path / "masks" / "a1.png")
    else:
        drawn = [feature(None, "Polygon", [ring(0, 0, 4, 2)])]
        (tmp_path / "masks" / "a1.geojson").write_text(json.dumps(drawn))
    slides = [str(cohort / "slides" / "site_a" / f"{name}.tif") for name in ("a1", "a2")]
    words = ["slide", str(model), *slides, "--out", str(tmp_path / "o"), "--mask", str(tmp_path / "masks")]
    assert main(words) == 0  # the other slide has no mask, and says so
    tiles = rows_of(tmp_path / "o" / "a1" / "tiles.csv")
    assert [(row["column"], row["row"]) for row in tiles] == [("0", "0"), ("1", "0")]
    assert "holds no a2.png" in rows_of(tmp_path / "o" / "cohort.csv")[1]["error"]


def test_a_mask_of_another_shape_is_refused(
    cohort: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (50, 50), 1).save(tmp_path / "square.png")
    slides = [str(path) for path in sorted((cohort / "slides" / "site_a").iterdir())]
    words = ["--out", str(tmp_path / "o"), "--mask", str(tmp_path / "square.png")]
    assert main(["slide", str(model), slides[0], *words]) == 1
    assert "another aspect than the slide's" in capsys.readouterr().err
    assert main(["slide", str(model), *slides, *words]) == 2
    assert "is one file for 2 slides" in capsys.readouterr().err


def test_a_plug_in_finds_the_tissue(
    cohort: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slide = str(cohort / "slides" / "site_a" / "a1.tif")
    assert main(["slide", str(model), slide, "--out", str(tmp_path / "o"), "--tissue", "corner"]) == 2
    assert "--tissue: unknown 'corner' (known: otsu)" in capsys.readouterr().err
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setitem(TISSUE, "corner", None)  # removed again after the test
    del TISSUE["corner"]
    (tmp_path / "corner.py").write_text(
        "import numpy as np\n"
        "from patchgen.slides.tissue import TISSUE\n"
        "def corner(picture, small):\n"
        "    mask = np.zeros(picture.shape[:2], dtype=bool)\n"
        "    mask[:16, :16] = True\n"
        "    return mask\n"
        'TISSUE["corner"] = corner\n'
    )
    words = ["--tissue", "corner", "--plugin", str(tmp_path / "corner.py")]
    assert main(["slide", str(model), slide, "--out", str(tmp_path / "o"), *words]) == 0
    facts = json.loads((tmp_path / "o" / "a1" / "slide.json").read_text())
    assert facts["tiles"] == 1 and facts["tissue"] == "corner"


def test_patients_pool_the_tiles_of_their_slides(cohort: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("slide,patient\na1,one\na2.tif,one\nb1,two\n")
    words = ["slide", str(model), str(cohort / "slides"), "--out", str(tmp_path / "o")]
    assert main([*words, "--patients", str(tmp_path / "p.csv")]) == 0
    one, two = rows_of(tmp_path / "o" / "patients.csv")
    assert (one["patient"], one["slides"], two["patient"], two["slides"]) == ("one", "2", "two", "1")
    pooled = [row for name in ("a1", "a2") for row in rows_of(tmp_path / "o" / name / "tiles.csv")]
    assert float(one["mean_p_tumour"]) == pytest.approx(np.mean([float(row["p_tumour"]) for row in pooled]), abs=1e-5)
    assert float(one["share_tumour"]) == pytest.approx(np.mean([row["label"] == "tumour" for row in pooled]), abs=1e-5)
    assert "Patients, over the tiles" in (tmp_path / "o" / "index.html").read_text()


def tiles_of(values: np.ndarray) -> pd.DataFrame:
    """One tile per value (rows, columns), the probability of class b."""
    row, column = np.indices(values.shape)
    p = values.ravel()
    labels = np.where(p > 0.5, "b", "a")
    return pd.DataFrame({"column": column.ravel(), "row": row.ravel(), "label": labels, "p_a": 1 - p, "p_b": p})


def test_intervals_are_those_of_independent_blocks() -> None:
    """Blocks of equal tiles: the interval of the mean is that of as many numbers as there are blocks."""
    blocks = np.random.default_rng(1).uniform(size=(20, 20))
    rate = rates(tiles_of(np.kron(blocks, np.ones((4, 4)))), ("a", "b"))
    assert isinstance(rate, Rates) and rate.tiles == 6400 and rate.values[0, 1] == pytest.approx(blocks.mean())
    half = 1.96 * blocks.std() / 20  # of 400 numbers
    np.testing.assert_allclose(rate.interval[:, 0, 1], (blocks.mean() - half, blocks.mean() + half), atol=half / 5)
    share = (blocks > 0.5).mean()
    half = 1.96 * np.sqrt(share * (1 - share)) / 20
    np.testing.assert_allclose(rate.interval[:, 1, 1], (share - half, share + half), atol=half / 5)
    assert np.isnan(rates(tiles_of(np.ones((4, 4))), ("a", "b")).interval).all()


def test_vectors_of_tiles_with_their_places(
    cohort: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchgen.predict.predictor import load_predictor

    areas = read_areas(monkeypatch)
    slides = [str(path) for path in sorted((cohort / "slides" / "site_a").iterdir())]
    (tmp_path / "bad.svs").write_text("no slide")
    words = ["slide", "embed", str(model), *slides, str(tmp_path / "bad.svs"), "--what", "features", "cls"]
    assert main([*words, "--out", str(tmp_path / "v")]) == 0
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "v" / f"{name}.npz") for name in ("a1", "a2")] and "1 of 3" in said.err
    found = np.load(tmp_path / "v" / "a2.npz")  # the last one read: both have the same corners
    assert set(found) == {"column", "row", "x", "y", "width", "height", "tissue", "features", "cls"}
    predictor = load_predictor(model)
    read = [areas[x, y] for x, y in zip(found["x"].tolist(), found["y"].tolist(), strict=True)]
    np.testing.assert_allclose(found["features"], predictor.outputs(read).features, atol=1e-4)
    np.testing.assert_array_equal(found["x"], found["column"] * 2 * TILE)
    (tmp_path / "v" / "a2.npz").unlink()  # as if the command had been stopped
    before = (tmp_path / "v" / "a1.npz").stat().st_mtime_ns
    assert main([*words, "--out", str(tmp_path / "v")]) == 0
    assert (tmp_path / "v" / "a1.npz").stat().st_mtime_ns == before and (tmp_path / "v" / "a2.npz").is_file()
    assert main([*words, "--out", str(tmp_path / "v"), "--min-tissue", "0.9"]) == 2
    assert "started with other settings (min_tissue 0.5, now 0.9)" in capsys.readouterr().err

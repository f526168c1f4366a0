"""Tissue, tiles, predictions and maps, against what was planted in the slide."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from patchgen.predict.predictor import Prediction
from patchgen.slides import heatmap
from patchgen.slides.heatmap import read_tiles, scan
from patchgen.slides.slide import Slide, TileGrid, UnreadableSlide, make_grid, open_slide, thumbnail
from patchgen.slides.tissue import Window, find_windows, otsu, tissue_mask

from .conftest import COLUMNS, MPP, ROWS, STEP, Planted

openslide = pytest.importorskip("openslide")

CLASSES = ("pink", "violet")


class ByColour:
    """Says violet as far as a tile's green is low; counts its batches, and may stop like a killed process."""

    interpolation = "bilinear"
    classes = CLASSES
    config = SimpleNamespace(image_size=32)

    def __init__(self, stop_after: int = 10**9) -> None:
        self.batches, self.stop_after = 0, stop_after

    def score(self, images: Sequence[np.ndarray]) -> list[Prediction]:
        if self.batches == self.stop_after:
            raise KeyboardInterrupt
        self.batches += 1
        violet = [float(np.clip((130 - image[..., 1].mean()) / 60, 0, 1)) for image in images]
        return [
            Prediction(Path(), CLASSES[v > 0.5], max(v, 1 - v), np.array([1 - v, v], np.float32),
                       np.full((2, 2), 0.25 + v / 2, np.float32), None, np.zeros(1)) for v in violet
        ]  # fmt: skip


@pytest.fixture(scope="module")
def opened(planted: Planted) -> Slide:
    return open_slide(planted.path)


@pytest.fixture(scope="module")
def grid(opened: Slide) -> TileGrid:
    return make_grid(opened, MPP, STEP)


@pytest.fixture(scope="module")
def places(opened: Slide, grid: TileGrid) -> list[Window]:
    return find_windows(tissue_mask(thumbnail(opened, grid), grid.cell**2 / 4), grid, 0.5)


def scanned(predictor: Any, opened: Slide, grid: TileGrid, places: list[Window], file: Path, batch: int = 8) -> Path:
    scan(predictor, opened, grid, places, file, batch)
    return file


# Tissue and tiles


def test_otsu_is_the_best_of_all_cuts() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(40, 12, 900), rng.normal(150, 30, 300)]).clip(0, 255).astype(np.uint8)

    def within(t: int) -> float:
        return sum(part.var() * part.size for part in (values[values <= t], values[values > t]))

    slow = min(range(int(values.min()), int(values.max())), key=within)
    assert otsu(values) == slow


def test_the_mask_is_the_planted_tissue(planted: Planted, opened: Slide, grid: TileGrid) -> None:
    mask = tissue_mask(thumbnail(opened, grid), grid.cell**2 / 4)
    scale = STEP // grid.cell
    truth = np.zeros_like(mask)
    small = planted.tissue[::scale, ::scale]
    truth[: small.shape[0], : small.shape[1]] = small
    assert (mask & truth).sum() / (mask | truth).sum() > 0.97  # the rest are rounded corners and edges
    assert mask[5 * 16 + 7, 4 * 16 + 7] and not mask[6, 15 * 16 + 2]  # the hole is filled, the speck is gone


def test_glass_alone_is_no_tissue() -> None:
    rng = np.random.default_rng(0)
    glass = (244 + rng.integers(-4, 5, (200, 300, 3))).astype(np.uint8)
    assert not tissue_mask(glass, 10).any()
    glass[50:90, 40:80] = rng.integers(0, 12, (40, 40, 3))  # black pen: its saturation is rounding noise
    assert not tissue_mask(glass, 10).any()


def test_tiles_are_exactly_those_with_planted_tissue(planted: Planted, grid: TileGrid, places: list[Window]) -> None:
    assert (grid.columns, grid.rows) == (COLUMNS + 1, ROWS + 1)  # a last one that reaches beyond the slide
    assert {(place.column, place.row) for place in places} == set(planted.tiles)
    assert places == sorted(places, key=lambda place: (place.row, place.column))


def test_a_slide_of_another_scale_gives_the_same_tissue(planted: Planted, tmp_path: Path) -> None:
    height, width = planted.pixels.shape[:2]
    wide = np.asarray(Image.fromarray(planted.pixels).resize((width * 5 // 3, height * 5 // 3)))
    heatmap.write_pyramid(tmp_path / "fine.tif", wide, (0.3, 0.3))
    with open_slide(tmp_path / "fine.tif") as slide:
        grid = make_grid(slide, MPP, STEP)
        assert grid.step == pytest.approx((STEP * 5 / 3, STEP * 5 / 3))
        mask = tissue_mask(thumbnail(slide, grid), grid.cell**2 / 4)
        assert {(window.column, window.row) for window in find_windows(mask, grid, 0.5)} == set(planted.tiles)


def test_an_area_is_read_as_it_is_and_white_beyond(planted: Planted, opened: Slide) -> None:
    np.testing.assert_array_equal(opened.read((128, 192), (64, 64), (64, 64)), planted.pixels[192:256, 128:192])
    width, height = opened.size
    corner = opened.read((width - 10, height - 6), (64, 64), (64, 64))
    assert (corner[6:] == 255).all() and (corner[:, 10:] == 255).all() and (corner[:6, :10] < 250).all()
    half = opened.read((128, 192), (128, 128), (64, 64)).astype(float)
    truth = planted.pixels[192:320, 128:256].reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
    assert np.abs(half - truth).mean() < 8  # another filter and a shift of a fraction of a pixel, on noise of +-15


# Slides that cannot be used


def test_an_unknown_scale_is_said_and_can_be_given(planted: Planted, tmp_path: Path) -> None:
    heatmap.write_pyramid(tmp_path / "bare.tif", planted.pixels[:300, :300])
    with pytest.raises(UnreadableSlide, match="--mpp-slide"):
        open_slide(tmp_path / "bare.tif")
    with open_slide(tmp_path / "bare.tif", mpp=0.25) as slide:
        assert slide.mpp == (0.25, 0.25)


def test_a_slide_that_is_too_coarse_is_refused(opened: Slide) -> None:
    with pytest.raises(UnreadableSlide, match="too coarse for --mpp 0.25"):
        make_grid(opened, 0.25, STEP)
    assert make_grid(opened, 0.48, STEP).step[0] == pytest.approx(61.44)  # within the scanners' few per cent


def test_no_file_and_no_slide(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSlide, match="it does not exist"):
        open_slide(tmp_path / "none.svs")
    (tmp_path / "text.svs").write_text("hello")
    with pytest.raises(UnreadableSlide, match="OpenSlide says"):
        open_slide(tmp_path / "text.svs")


# Predictions


@pytest.fixture(scope="module")
def tiles(
    opened: Slide, grid: TileGrid, places: list[Window], tmp_path_factory: pytest.TempPathFactory
) -> pd.DataFrame:
    return read_tiles(scanned(ByColour(), opened, grid, places, tmp_path_factory.mktemp("scan") / "tiles.csv"))


def test_every_tile_gets_its_own_verdict(planted: Planted, grid: TileGrid, tiles: pd.DataFrame) -> None:
    assert {(tile.column, tile.row): tile.label for tile in tiles.itertuples()} == planted.tiles
    for tile in tiles.itertuples():
        left, top, right, bottom = grid.box(tile.column, tile.row)
        assert (tile.x, tile.y, tile.width, tile.height) == (left, top, right - left, bottom - top)
    np.testing.assert_allclose(tiles["p_pink"] + tiles["p_violet"], 1, atol=1e-5)
    np.testing.assert_allclose(tiles["mask"], 0.25 + tiles["p_violet"] / 2, atol=1e-5)
    assert tiles["unlike_training"].isna().all()


@pytest.mark.parametrize(("lost_lines", "torn"), [(0, ""), (3, "12,7,768,4")])
def test_a_killed_pass_goes_on_to_the_same_file(
    opened: Slide, grid: TileGrid, places: list[Window], tmp_path: Path, torn: str, lost_lines: int
) -> None:
    whole = scanned(ByColour(), opened, grid, places, tmp_path / "whole.csv").read_text()
    file = tmp_path / "tiles.csv"
    with pytest.raises(KeyboardInterrupt):
        scan(ByColour(stop_after=3), opened, grid, places, file, 8)  # type: ignore[arg-type]
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 8
    file.write_text("".join(lines[: len(lines) - lost_lines]) + torn)  # a kill may come in the middle of a write
    counts: list[int] = []
    rest = ByColour()
    scan(rest, opened, grid, places, file, 8, counts.append)  # type: ignore[arg-type]
    assert file.read_text() == whole and sum(counts) == len(places)
    assert rest.batches == -(-len(places) // 8) - (2 if lost_lines else 3)
    again = ByColour()
    scanned(again, opened, grid, places, file)
    assert again.batches == 0 and file.read_text() == whole
    with pytest.raises(ValueError, match="other tiles"):
        scanned(again, opened, grid, places[1:], file)


# Maps and shapes


def test_maps_have_each_value_at_its_place(
    planted: Planted, opened: Slide, grid: TileGrid, tiles: pd.DataFrame, tmp_path: Path
) -> None:
    maps = heatmap.collect_maps(tiles, grid, CLASSES)
    assert set(maps) == {"p pink", "p violet", "mask mean"}
    for row in range(grid.rows):
        for column in range(grid.columns):
            kind, value = planted.tiles.get((column, row)), maps["p violet"][row, column]
            assert np.isnan(value) if kind is None else (value > 0.5) == (kind == "violet")
    small = thumbnail(opened, grid)
    names = heatmap.write_map(tmp_path / "violet", "p violet", maps["p violet"], grid, small, opened.mpp)
    assert names == ["violet.png", "violet.tif", "violet_overlay.png"]
    pixels = np.asarray(Image.open(tmp_path / "violet.png"))
    assert pixels.shape[:2] == heatmap.enlarge(maps["p violet"], grid).shape == grid.map_size[::-1]
    width, height = opened.size
    for x, y in [(10, 10), (3 * STEP + 5, 4 * STEP + 60), (12 * STEP + 1, 11 * STEP + 1), (width - 1, height - 1)]:
        there = pixels[y * len(pixels) // height, x * pixels.shape[1] // width]  # by proportion, as a viewer does
        kind = planted.tiles.get((x // STEP, y // STEP))
        values = maps["p violet"][y // STEP, x // STEP : x // STEP + 1]
        expected = heatmap.colour(values)[0] if kind else (255, 255, 255, 0)
        np.testing.assert_array_equal(there, expected)
    with openslide.OpenSlide(str(tmp_path / "violet.tif")) as found:
        assert float(found.properties["openslide.mpp-x"]) * found.dimensions[0] == pytest.approx(width * MPP, rel=1e-3)
        area = np.asarray(found.read_region((0, 0), 0, found.dimensions))[..., :3]
        np.testing.assert_array_equal(area, pixels[..., :3])
    assert min(Image.open(tmp_path / "violet_overlay.png").size) > 300


def test_geojson_is_what_qupath_reads(tiles: pd.DataFrame, tmp_path: Path) -> None:
    heatmap.write_geojson(tmp_path / "t.geojson", tiles, CLASSES)
    found = json.loads((tmp_path / "t.geojson").read_text())
    assert found["type"] == "FeatureCollection" and len(found["features"]) == len(tiles)
    for one, tile in zip(found["features"], tiles.itertuples(), strict=True):
        [ring] = one["geometry"]["coordinates"]
        assert one["type"] == "Feature" and one["geometry"]["type"] == "Polygon"
        assert ring[0] == ring[-1] and len(ring) == 5 and len({tuple(point) for point in ring}) == 4
        area = sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(ring, ring[1:], strict=False)) / 2
        assert area == STEP * STEP  # positive: the outer ring's sense
        assert ring[0] == [tile.column * STEP, tile.row * STEP]
        properties = one["properties"]
        assert properties["classification"]["name"] == tile.label
        assert tuple(properties["classification"]["color"]) == heatmap.CLASS_COLOURS[CLASSES.index(tile.label)]
        assert properties["measurements"]["p violet"] == tile.p_violet
        assert properties["measurements"].keys() == {"p pink", "p violet", "tissue", "mask mean"}
    heatmap.write_geojson(tmp_path / "empty.geojson", tiles[:0], CLASSES)
    assert json.loads((tmp_path / "empty.geojson").read_text())["features"] == []


@pytest.mark.parametrize(("more", "message"), [
    ([], "no slide given"),
    (["a/x.svs", "b/x.svs"], "two slides are called 'x'"),
    (["x.svs", "--min-tissue", "2"], "--min-tissue must be at most 1"),
    (["x.svs", "--mpp-slide", "0"], "--mpp-slide must be above 0"),
])  # fmt: skip
def test_mistakes_are_one_sentence(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from patchgen.cli import main

    assert main(["slide", "run", *more, "--out", "never"]) == 2
    assert message in capsys.readouterr().err

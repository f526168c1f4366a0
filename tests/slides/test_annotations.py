"""Regions of QuPath against areas that are known, and against counting pixels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

shapely = pytest.importorskip("shapely")

from patchgen.slides import annotations  # noqa: E402
from patchgen.slides.annotations import MOST_POINTS, drawn_mask, read_shapes, shares, summarise  # noqa: E402

from .cohort import TILE, annotation, feature, ring  # noqa: E402

SQUARE = ring(0, 0, 1, 1)


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.geojson"


def covered(path: Path, content: Any, *boxes: tuple[float, ...]) -> list[dict[str, float]]:
    """Of each box, in tiles, the share of every class."""
    scaled: Any = [tuple(float(TILE * n) for n in box) for box in boxes]
    return [by_class for by_class, _ in shares(scaled, written(path, content))]


def test_holes_and_parts_count_as_they_are_drawn(file: Path) -> None:
    boxes = [(7, 1, 8, 2), (8, 3, 10, 5), (7.5, 3, 8.5, 4), (1, 5, 2, 6), (4, 1, 8, 2)]
    half, quarter = pytest.approx(0.5), pytest.approx(0.25)
    assert covered(file, annotation(), *boxes) == [
        {"tumour": 1.0}, {}, {"tumour": half}, {"stroma": half}, {"stroma": quarter, "tumour": quarter}
    ]  # fmt: skip


def test_shares_are_those_of_counted_pixels(file: Path) -> None:
    rng = np.random.default_rng(5)
    polygons = [(rng.random((7, 2)) * 12 * TILE).tolist() for _ in range(4)]
    hulls = [list(shapely.MultiPoint(points).convex_hull.exterior.coords) for points in polygons]
    picture = Image.new("1", (12 * TILE, 12 * TILE))
    for hull in hulls:
        ImageDraw.Draw(picture).polygon(hull, fill=1)
    pixels, corners = np.asarray(picture), rng.integers(0, 10, (20, 2))
    content = [feature("x", "Polygon", [hull]) for hull in hulls]  # they overlap
    parts = covered(file, content, *((left, top, left + 2, top + 2) for left, top in corners))
    for (left, top), by_class in zip(corners * TILE, parts, strict=True):
        counted = pixels[top : top + 2 * TILE, left : left + 2 * TILE].mean()
        assert by_class.get("x", 0) == pytest.approx(counted, abs=0.03)


def test_overlap_counts_once_in_a_class_and_in_all(file: Path) -> None:
    content = [feature("x", "Polygon", [ring(0, 0, 2, 1)]), feature("x", "Polygon", [ring(1, 0, 3, 1)]),
               feature("y", "Polygon", [SQUARE])]  # fmt: skip
    box = (0.0, 0.0, 4.0 * TILE, 1.0 * TILE)
    [(by_class, any_class)] = shares([box], written(file, content))
    assert by_class == {"x": pytest.approx(0.75), "y": pytest.approx(0.25)} and any_class == pytest.approx(0.75)
    assert shares([box], file, ignore=["x"]) == [({"y": pytest.approx(0.25)}, pytest.approx(0.25))]


def test_the_origin_shifts_all_shapes(file: Path) -> None:
    written(file, [feature("x", "Polygon", [SQUARE])])
    box = (10.0 * TILE, 0.0, 11.0 * TILE, 1.0 * TILE)
    assert shares([box], file, origin=(10 * TILE, 0)) == [({"x": 1.0}, 1.0)]


def test_what_labels_nothing_is_counted(file: Path) -> None:
    classes, ignored = summarise(written(file, annotation()))
    assert classes == {"tumour": 1, "stroma": 1}
    assert ignored == {"class Ignore*": 1, "no class": 1, "shape Point": 1, "object of type detection": 1}


def test_a_mask_is_drawn_with_its_holes_and_what_lies_in_them(file: Path) -> None:
    content = [
        feature(None, "Polygon", [ring(0, 0, 8, 8), ring(2, 2, 6, 6)]),
        feature("x", "Polygon", [ring(3, 3, 5, 5)]),
    ]
    mask = drawn_mask(written(file, content), (80, 100), (TILE / 10, TILE / 10))
    truth = np.zeros((100, 80), dtype=bool)
    truth[:80, :80], truth[20:60, 20:60], truth[30:50, 30:50] = True, False, True
    assert (mask != truth).mean() < 0.05  # the pixels of the borders


def test_derived_classes_collections_and_crossing_polygons(file: Path) -> None:
    derived = feature(None, "Polygon", [SQUARE], classification={"names": ["Tumor", "Positive"]})
    square = {"type": "Polygon", "coordinates": [SQUARE]}
    mixed = {**feature("x", "", None), "geometry": {"type": "GeometryCollection", "geometries": [square]}}
    assert covered(file, [derived, mixed], (0, 0, 1, 1)) == [{"Tumor: Positive": 1.0, "x": 1.0}]
    assert covered(file, derived, (0, 0, 1, 1)) == [{"Tumor: Positive": 1.0}]  # a single feature
    bow = [[0, 0], [2 * TILE, 0], [0, 2 * TILE], [2 * TILE, 2 * TILE], [0, 0]]
    assert covered(file, feature("x", "Polygon", [bow]), (0, 0, 2, 2)) == [{"x": pytest.approx(0.5)}]


@pytest.mark.parametrize(("content", "message"), [
    ("no json", "is not readable GeoJSON"),
    ({"type": "Topology"}, "labels nothing (1 x shape None)"),
    (1, "is no GeoJSON of features"),
    ([1], "feature 1 is not a polygon"),
    ({"type": "FeatureCollection", "features": []}, "labels nothing (no feature)"),
    ([feature(None, "Polygon", [SQUARE])], "labels nothing (1 x no class)"),
    ([feature("x", "Polygon", [[[0, 0], [1, 1]]])], "feature 1 is not a polygon"),
    ([feature("x", "Polygon", [[["a", 0], [1, 1], [2, 2], [0, 0]]])], "feature 1 is not a polygon"),
    ([feature("x", "Polygon", [[[0, 0], [1, 0], [2, 0], [0, 0]]])], "it has no area"),
    ([feature("x", "Polygon", None)], "feature 1 is not a polygon"),
    ([{**feature("x", "Polygon", []), "properties": [1]}], "feature 1 is not a polygon"),
])  # fmt: skip
def test_other_files_are_refused_in_one_sentence(file: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_shapes(written(file, content))
    assert message in str(error.value) and "a.geojson" in str(error.value) and "\n" not in str(error.value)


def circle(points: int, step: int = 1) -> list[list[float]]:
    """A ring that joins every `step`-th point of a circle; with half of them it crosses itself `points`^2 / 4 times."""
    angles = np.arange(points + 1) * step * 2 * np.pi / points
    return [[5000 + 4000 * float(np.cos(a)), 5000 + 4000 * float(np.sin(a))] for a in angles]


@pytest.mark.parametrize(("content", "message"), [
    ([feature("x", "Polygon", [circle(201, 99)])] * 30, "needs too much time or memory"),
    ('[{"geometry": {"coordinates": [[%s[0,0]]]}}]' % ("[0,0]," * MOST_POINTS), "draws more than"),
    ('[{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[0,0],[1%s,0],[1,1],[0,0]]]}, '
     '"properties": {"classification": {"name": "x"}}}]' % ("0" * 400), "not a polygon"),
], ids=["star", "points", "number"])  # fmt: skip
def test_forged_polygons_are_one_sentence(
    content: Any, message: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message == "needs too much time or memory":
        monkeypatch.setattr(annotations, "SECONDS", 4.0)
    with pytest.raises(ValueError, match=message):
        summarise(written(file, content))


def test_many_equal_polygons_cost_no_more_than_the_limit(file: Path) -> None:
    written(file, [feature("x", "Polygon", [circle(100)])] * 2000)
    assert shares([(4000.0, 4000.0, 6000.0, 6000.0)], file) == [({"x": 1.0}, 1.0)]

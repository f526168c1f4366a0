"""Regions of QuPath against areas that are known, and against counting pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

shapely = pytest.importorskip("shapely")

from patchgen.slides import annotations  # noqa: E402
from patchgen.slides.annotations import MOST_POINTS, Cover, drawn_mask, read_shapes, shares, summarise  # noqa: E402

from .cohort import TILE, annotation, feature, ring  # noqa: E402


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def covered(path: Path, content: Any, *box: float) -> dict[str, float]:
    by_class, _ = Cover(read_shapes(written(path, content))[0]).shares(tuple(TILE * n for n in box))  # type: ignore[arg-type]
    return by_class


def test_holes_and_parts_count_as_they_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "a.geojson"
    assert covered(file, annotation(), 7, 1, 8, 2) == {"tumour": 1.0}
    assert covered(file, annotation(), 8, 3, 10, 5) == {}  # the hole
    assert covered(file, annotation(), 7.5, 3, 8.5, 4) == {"tumour": pytest.approx(0.5)}
    assert covered(file, annotation(), 1, 5, 2, 6) == {"stroma": pytest.approx(0.5)}
    assert covered(file, annotation(), 4, 1, 8, 2) == {"stroma": pytest.approx(0.25), "tumour": pytest.approx(0.25)}


def test_shares_are_those_of_counted_pixels(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    polygons = [(rng.random((7, 2)) * 12 * TILE).tolist() for _ in range(4)]
    hulls = [list(shapely.MultiPoint(points).convex_hull.exterior.coords) for points in polygons]
    content = [feature("x", "Polygon", [hull]) for hull in hulls]  # they overlap
    picture = Image.new("1", (12 * TILE, 12 * TILE))
    for hull in hulls:
        ImageDraw.Draw(picture).polygon(hull, fill=1)
    pixels = np.asarray(picture)
    cover = Cover(read_shapes(written(tmp_path / "a.geojson", content))[0])
    for left, top in rng.integers(0, 10, (20, 2)) * TILE:
        box = tuple(float(n) for n in (left, top, left + 2 * TILE, top + 2 * TILE))
        counted = pixels[top : top + 2 * TILE, left : left + 2 * TILE].mean()
        by_class, covered = cover.shares(box)  # type: ignore[arg-type]
        assert by_class.get("x", 0) == pytest.approx(covered) == pytest.approx(counted, abs=0.03)


def test_overlap_counts_once_in_a_class_and_in_all(tmp_path: Path) -> None:
    content = [feature("x", "Polygon", [ring(0, 0, 2, 1)]), feature("x", "Polygon", [ring(1, 0, 3, 1)]),
               feature("y", "Polygon", [ring(0, 0, 1, 1)])]  # fmt: skip
    box = (0.0, 0.0, 4.0 * TILE, 1.0 * TILE)
    [(by_class, covered)] = shares([box], written(tmp_path / "a.geojson", content))
    assert by_class == {"x": pytest.approx(0.75), "y": pytest.approx(0.25)} and covered == pytest.approx(0.75)
    assert shares([box], tmp_path / "a.geojson", ignore=["x"]) == [({"y": pytest.approx(0.25)}, pytest.approx(0.25))]


def test_the_origin_shifts_all_shapes(tmp_path: Path) -> None:
    file = written(tmp_path / "a.geojson", [feature("x", "Polygon", [ring(0, 0, 1, 1)])])
    box = (10.0 * TILE, 0.0, 11.0 * TILE, 1.0 * TILE)
    assert shares([box], file, origin=(10 * TILE, 0)) == [({"x": 1.0}, 1.0)]


def test_what_labels_nothing_is_counted(tmp_path: Path) -> None:
    summary = summarise(written(tmp_path / "a.geojson", annotation()))
    assert summary.classes == {"tumour": 1, "stroma": 1}
    assert summary.left_aside == {"class Ignore*": 1, "no class": 1, "shape Point": 1, "object of type detection": 1}


def test_a_mask_is_drawn_with_its_holes_and_what_lies_in_them(tmp_path: Path) -> None:
    content = [
        feature(None, "Polygon", [ring(0, 0, 8, 8), ring(2, 2, 6, 6)]),
        feature("x", "Polygon", [ring(3, 3, 5, 5)]),
    ]
    mask = drawn_mask(written(tmp_path / "a.geojson", content), (80, 100), (TILE / 10, TILE / 10))
    truth = np.zeros((100, 80), dtype=bool)
    truth[:80, :80], truth[20:60, 20:60], truth[30:50, 30:50] = True, False, True
    assert (mask != truth).mean() < 0.05  # the pixels of the borders


def test_names_of_derived_classes_and_collections(tmp_path: Path) -> None:
    square = {"type": "Polygon", "coordinates": [ring(0, 0, 1, 1)]}
    derived = feature(None, "Polygon", [ring(0, 0, 1, 1)], classification={"names": ["Tumor", "Positive"]})
    mixed = {**feature("x", "", None), "geometry": {"type": "GeometryCollection", "geometries": [square]}}
    assert covered(tmp_path / "a.geojson", [derived, mixed], 0, 0, 1, 1) == {"Tumor: Positive": 1.0, "x": 1.0}
    assert covered(tmp_path / "b.geojson", derived, 0, 0, 1, 1) == {"Tumor: Positive": 1.0}  # a single feature


def test_a_polygon_that_crosses_itself_is_repaired(tmp_path: Path) -> None:
    bow = [[0, 0], [2 * TILE, 0], [0, 2 * TILE], [2 * TILE, 2 * TILE], [0, 0]]
    assert covered(tmp_path / "a.geojson", feature("x", "Polygon", [bow]), 0, 0, 2, 2) == {"x": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not readable GeoJSON"),
        ({"type": "Topology"}, "is no GeoJSON of features"),
        ([1], "is no GeoJSON of features"),
        ({"type": "FeatureCollection", "features": []}, "labels nothing (no feature)"),
        ([feature(None, "Polygon", [ring(0, 0, 1, 1)])], "labels nothing (1 x no class)"),
        ([feature("x", "Polygon", [[[0, 0], [1, 1]]])], "feature 1 is not a polygon"),
        ([feature("x", "Polygon", [[["a", 0], [1, 1], [2, 2], [0, 0]]])], "feature 1 is not a polygon"),
        ([feature("x", "Polygon", [[[0, 0], [1, 0], [2, 0], [0, 0]]])], "it has no area"),
        ([feature("x", "Polygon", None)], "feature 1 is not a polygon"),
        ([{**feature("x", "Polygon", []), "properties": [1]}], "feature 1 is not a polygon"),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_shapes(written(tmp_path / "a.geojson", content))
    assert message in str(error.value) and "a.geojson" in str(error.value) and "\n" not in str(error.value)


def star(points: int) -> list[list[float]]:
    """A ring that crosses itself about `points`^2 / 4 times."""
    angles = np.arange(points + 1) * (points // 2 - 1) * 2 * np.pi / points
    return [[5000 + 4000 * float(np.cos(a)), 5000 + 4000 * float(np.sin(a))] for a in angles]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([feature("x", "Polygon", [star(201)])] * 30, "needs too much time or memory"),
        ('[{"geometry": {"coordinates": [[%s[0,0]]]}}]' % ("[0,0]," * MOST_POINTS), "draws more than"),
        ('[{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[0,0],[1%s,0],[1,1],[0,0]]]}, '
         '"properties": {"classification": {"name": "x"}}}]' % ("0" * 400), "not a polygon"),
    ],
    ids=["star", "points", "number"],
)  # fmt: skip
def test_forged_polygons_are_one_sentence(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotations, "SECONDS", 4.0)
    with pytest.raises(ValueError, match=message):
        summarise(written(tmp_path / "a.geojson", content))


def test_many_equal_polygons_cost_no_more_than_the_limit(tmp_path: Path) -> None:
    equal = feature("x", "Polygon", [[[5000 + 4000 * float(np.cos(a)), 5000 + 4000 * float(np.sin(a))]
                                      for a in np.linspace(0, 2 * np.pi, 100)]])  # fmt: skip
    [(by_class, _)] = shares([(4000.0, 4000.0, 6000.0, 6000.0)], written(tmp_path / "a.geojson", [equal] * 500))
    assert by_class == {"x": 1.0}

"""Regions of QuPath against areas that are known, and against counting pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

shapely = pytest.importorskip("shapely")

from patchgen.slides.annotations import Cover, read_annotations  # noqa: E402

from .cohort import TILE, annotation, feature, ring  # noqa: E402


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def covered(path: Path, content: Any, *box: float) -> dict[str, float]:
    cover = Cover(read_annotations(written(path, content)).shapes)
    return cover.shares(tuple(TILE * n for n in box))  # type: ignore[arg-type]


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
    cover = Cover(read_annotations(written(tmp_path / "a.geojson", content)).shapes)
    for left, top in rng.integers(0, 10, (20, 2)) * TILE:
        box = tuple(float(n) for n in (left, top, left + 2 * TILE, top + 2 * TILE))
        counted = pixels[top : top + 2 * TILE, left : left + 2 * TILE].mean()
        assert cover.shares(box).get("x", 0) == pytest.approx(counted, abs=0.03)  # type: ignore[arg-type]
        assert cover.covered(box) == pytest.approx(counted, abs=0.03)  # type: ignore[arg-type]


def test_overlap_counts_once_in_a_class_and_in_all(tmp_path: Path) -> None:
    content = [feature("x", "Polygon", [ring(0, 0, 2, 1)]), feature("x", "Polygon", [ring(1, 0, 3, 1)]),
               feature("y", "Polygon", [ring(0, 0, 1, 1)])]  # fmt: skip
    cover = Cover(read_annotations(written(tmp_path / "a.geojson", content)).shapes)
    box = (0.0, 0.0, 4.0 * TILE, 1.0 * TILE)
    assert cover.shares(box) == {"x": pytest.approx(0.75), "y": pytest.approx(0.25)}
    assert cover.covered(box) == pytest.approx(0.75)


def test_the_origin_shifts_all_shapes(tmp_path: Path) -> None:
    shapes = read_annotations(written(tmp_path / "a.geojson", [feature("x", "Polygon", [ring(0, 0, 1, 1)])])).shapes
    assert Cover(shapes, (10 * TILE, 0)).shares((10 * TILE, 0, 11 * TILE, TILE)) == {"x": 1.0}


def test_what_labels_nothing_is_counted(tmp_path: Path) -> None:
    found = read_annotations(written(tmp_path / "a.geojson", annotation()))
    assert set(found.shapes) == {"tumour", "stroma"}
    assert found.left_aside == {"class Ignore*": 1, "no class": 1, "shape Point": 1, "object of type detection": 1}


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
        read_annotations(written(tmp_path / "a.geojson", content))
    assert message in str(error.value) and "a.geojson" in str(error.value) and "\n" not in str(error.value)

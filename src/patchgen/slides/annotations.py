"""Manual annotations as exported by QuPath: GeoJSON polygons with the name of a class.

    regions = read_annotations("biopsy.geojson")             # shapes, and counts of ignored features
    cover = Cover(regions.shapes)                            # by class
    cover.shares((0, 0, 448, 448))                           # {"tumour": 0.75, "stroma": 0.25}

Coordinates are pixels of level 0. Polygons may have holes and several parts; self-intersecting ones are repaired.
Overlapping shapes of one class count once. Features that are not areas (points, lines), not annotations (cells, tiles)
or have no class are ignored and counted. QuPath's classes with a trailing `*`, such as `Ignore*`, are ignored too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.common.files import refuse_pipe
from patchgen.common.reading import shortly

if TYPE_CHECKING:
    from shapely.geometry.base import BaseGeometry

INSTALL = 'annotations need shapely, which is not installed: pip install "patchgen[slides]"'
MOST_BYTES = 1 << 29  # of a file
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Annotations:
    """The content of a file."""

    shapes: dict[str, list[BaseGeometry]]  # by class
    left_aside: Counter[str] = field(default_factory=Counter)  # why -> how many


class Cover:
    """How much of an area each class covers."""

    def __init__(self, shapes: Mapping[str, list[BaseGeometry]], origin: tuple[float, float] = (0, 0)) -> None:
        """`origin` is the level-0 pixel at which the coordinates of the shapes start."""
        from shapely import STRtree, union_all
        from shapely.affinity import translate

        self.trees: dict[str, STRtree] = {}
        for name, parts in shapes.items():
            whole = translate(union_all(parts), *origin)  # parts that overlap count once
            self.trees[name] = STRtree([part for part in getattr(whole, "geoms", [whole]) if part.area])

    def shares(self, box: Box) -> dict[str, float]:
        """Share of the area in each class that covers any of it; classes may overlap, so the sum may exceed 1."""
        import shapely

        area, found = shapely.box(*box), {}
        for name, tree in self.trees.items():
            near = tree.geometries[tree.query(area, predicate="intersects")]
            if len(near) and (covered := float(shapely.area(shapely.intersection(near, area)).sum())):
                found[name] = min(1.0, covered / area.area)
        return found

    def covered(self, box: Box) -> float:
        """Share of the area in any class."""
        import shapely

        area = shapely.box(*box)
        near = [g for tree in self.trees.values() for g in tree.geometries[tree.query(area, predicate="intersects")]]
        return min(1.0, float(shapely.union_all(shapely.intersection(near, area)).area / area.area)) if near else 0.0


def read_annotations(path: str | Path) -> Annotations:
    """The shapes of a GeoJSON file.

    Raises:
        ValueError: not GeoJSON, an invalid polygon, or no labelled area.
    """
    require_shapely()
    from shapely.errors import ShapelyError

    found: dict[str, list[BaseGeometry]] = {}
    aside: Counter[str] = Counter()
    for number, feature in enumerate(_features(Path(path)), 1):
        try:
            properties = feature.get("properties") or {}
            name, why = _class_name(properties), _why_not(properties, feature.get("geometry") or {})
            if why or not name or name.endswith("*"):
                aside[why or ("class " + name if name else "no class")] += 1
                continue
            found.setdefault(name, []).append(_area(feature["geometry"]))
        except (AttributeError, KeyError, TypeError, IndexError, ValueError, ShapelyError) as error:
            raise ValueError(
                f"{path}: feature {number} is not a polygon as QuPath exports it "
                f"({type(error).__name__}: {error!s:.100}); export the annotations again as GeoJSON"
            ) from error
    if not found:
        counts = ", ".join(f"{count} x {why}" for why, count in aside.items()) or "no feature"
        raise ValueError(f"{path} labels nothing ({counts}); give the annotations a class in QuPath and export again")
    return Annotations(found, aside)


def _features(path: Path) -> Iterator[dict[str, Any]]:
    """QuPath writes a collection, a list of features, or a single feature."""
    refuse_pipe(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} is longer than {MOST_BYTES:,} bytes; export the annotations alone, without cells")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not readable GeoJSON ({type(error).__name__}: {error!s:.100})") from error
    kind = content.get("type") if isinstance(content, dict) else None
    features = content if isinstance(content, list) else content.get("features") if kind == "FeatureCollection" else (
        [content] if kind == "Feature" else None
    )  # fmt: skip
    if not isinstance(features, list) or not all(isinstance(one, dict) for one in features):
        raise ValueError(f"{path} is no GeoJSON of features, found {shortly(kind or type(content).__name__)}")
    yield from features


def _class_name(properties: dict[str, Any]) -> str:
    """QuPath's name of a class; a derived class has several parts, written `Tumor: Positive` there."""
    found = properties.get("classification") or {}
    names = found.get("names") or [found.get("name") or ""]
    return ": ".join(str(name) for name in names).strip()


def _why_not(properties: dict[str, Any], geometry: dict[str, Any]) -> str:
    """Why a feature is ignored; empty if it labels an area."""
    kind = str(properties.get("objectType") or "annotation").lower()
    if kind not in ("annotation", "pathannotationobject"):
        return f"object of type {kind}"
    shape = str(geometry.get("type"))
    return "" if shape in ("Polygon", "MultiPolygon", "GeometryCollection") else f"shape {shape}"


def _area(geometry: dict[str, Any]) -> BaseGeometry:
    """The valid area of a polygon with its holes, of several, or of those of a collection."""
    import shapely
    from shapely.geometry import shape

    area = shape(geometry)
    area = area if area.is_valid else shapely.make_valid(area)
    parts = [part for part in shapely.get_parts(area) if part.geom_type in ("Polygon", "MultiPolygon")]
    whole = shapely.union_all(parts)
    if not 0 < whole.area < float("inf"):
        raise ValueError("it has no area")
    return whole


def require_shapely() -> None:
    """ValueError if the library is missing."""
    try:
        import shapely  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL) from error

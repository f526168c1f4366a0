"""Manual annotations as exported by QuPath: GeoJSON polygons, in pixels of level 0, with the name of a class.

Features that are not areas, not annotations (cells, tiles) or have no class are ignored and counted, as are QuPath's
classes with a trailing `*`. A forged polygon can keep geometry code busy for hours: it runs in a child with limits.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.common.child_process import Child, ChildDied, ChildError, Message, serve
from patchgen.common.files import refuse_pipe
from patchgen.common.untrusted import shortly

if TYPE_CHECKING:
    from shapely.geometry.base import BaseGeometry

INSTALL = 'annotations need shapely, which is not installed: pip install "patchgen[slides]"'
MOST_BYTES = 1 << 28  # of a file
MOST_POINTS = 1_000_000  # of all polygons together
SECONDS, MEMORY = 60.0, 4 << 30  # to read the file, and bytes of the child's address space
BOX_SECONDS = 0.05  # in addition for each box, on average
AREAS = ("Polygon", "MultiPolygon")
Box = tuple[float, float, float, float]  # left, top, right, bottom
Share = tuple[dict[str, float], float]  # share of an area that each class covers, and that any class covers
Shapes = dict[str, list["BaseGeometry"]]  # by class


def summarise(path: str | Path) -> tuple[dict[str, int], Counter[str]]:
    """The number of areas of each class, and how many features are ignored for which reason."""
    answer, _ = _ask(path, {})
    return answer["classes"], Counter(answer["ignored"])


def shares(
    boxes: Sequence[Box], path: str | Path, *, ignore: Collection[str] = (), origin: tuple[float, float] = (0, 0)
) -> list[Share]:
    """How much of each box the classes cover; the coordinates of the shapes start at the level-0 pixel `origin`."""
    answer, _ = _ask(path, {"boxes": boxes, "ignore": sorted(ignore), "origin": origin})
    return [(by_class, covered) for by_class, covered in answer["shares"]]


def drawn_mask(path: str | Path, size: tuple[int, int], scale: tuple[float, float]) -> np.ndarray:
    """All areas of a file as a picture (height, width) bool of `scale` level-0 pixels per pixel, in x and y."""
    _, data = _ask(path, {"size": size, "scale": scale})
    return np.frombuffer(data, np.uint8).reshape(size[1], size[0]) > 0


def _ask(path: str | Path, request: dict[str, Any]) -> Message:
    if find_spec("shapely") is None:
        raise ValueError(INSTALL)
    refuse_pipe(Path(path))
    with closing(Child(__name__, SECONDS + BOX_SECONDS * len(request.get("boxes", ())))) as child:
        try:
            return child.ask({"read": str(path), **request})
        except ChildError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
        except ChildDied as error:
            reason = f"{path} needs too much time or memory ({error}; at most {MEMORY >> 30} GB)"
            raise ValueError(f"{reason}: simplify its polygons in QuPath and export again") from error


# In the child


def _answer(request: dict[str, Any], _: bytes) -> Message:
    shapes, ignored = read_shapes(request["read"], any_class="size" in request)
    if "size" in request:
        return {}, _draw(shapes, tuple(request["size"]), request["scale"])
    if "boxes" in request:
        used = {name: parts for name, parts in shapes.items() if name not in request["ignore"]}
        return {"shares": _shares(used, request["boxes"], request["origin"])}, b""
    return {"classes": {name: len(areas) for name, areas in shapes.items()}, "ignored": ignored}, b""


def read_shapes(path: str | Path, any_class: bool = False) -> tuple[Shapes, Counter[str]]:
    """The shapes of a file, with `any_class` also those without one, and the ignored features by the reason."""
    from shapely.errors import ShapelyError

    shapes, ignored = Shapes(), Counter[str]()
    for number, feature in enumerate(_features(Path(path)), 1):
        try:
            properties, geometry = feature.get("properties") or {}, feature.get("geometry") or {}
            kind = str(properties.get("objectType") or "annotation").lower()
            about = properties.get("classification") or {}
            # a derived class has several names, and is written `Tumor: Positive` in QuPath
            name = ": ".join(map(str, about.get("names") or [about.get("name") or ""])).strip()
            if kind not in ("annotation", "pathannotationobject"):
                ignored[f"object of type {kind}"] += 1
            elif geometry.get("type") not in (*AREAS, "GeometryCollection"):
                ignored[f"shape {geometry.get('type')}"] += 1
            elif not (name or any_class) or name.endswith("*"):
                ignored[f"class {name}" if name else "no class"] += 1
            else:
                shapes.setdefault(name, []).append(_area(geometry))
        except (AttributeError, KeyError, TypeError, IndexError, ValueError, OverflowError, ShapelyError) as error:
            reason = f"feature {number} is not a polygon as QuPath exports it ({type(error).__name__}: {error!s:.100})"
            raise ValueError(f"{path}: {reason}; export the annotations again as GeoJSON") from error
    if not shapes:
        counts = ", ".join(f"{count} x {why}" for why, count in ignored.items()) or "no feature"
        raise ValueError(f"{path} labels nothing ({counts}); give the annotations a class in QuPath and export again")
    return shapes, ignored


def _features(path: Path) -> list[dict[str, Any]]:
    """QuPath writes a collection, a list of features, or a single feature."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is longer than {MOST_BYTES:,} bytes; export the annotations alone, without cells")
    try:
        content = json.loads(data := path.read_bytes())
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} is not readable GeoJSON ({type(error).__name__}: {error!s:.100})") from error
    features = content.get("features", [content]) if isinstance(content, dict) else content
    if not isinstance(features, list):
        raise ValueError(f"{path} is no GeoJSON of features, found {shortly(features)}")
    if data.count(b"[") > MOST_POINTS:  # each point is a list
        raise ValueError(f"{path} draws more than {MOST_POINTS:,} points; simplify them and export again")
    return features


def _area(geometry: dict[str, Any]) -> "BaseGeometry":
    """The valid area of a polygon with its holes, of several, or of those of a collection."""
    import shapely
    from shapely.geometry import shape

    area = shape(geometry)
    area = area if area.is_valid else shapely.make_valid(area)
    whole = shapely.union_all([part for part in shapely.get_parts(area) if part.geom_type in AREAS])
    if not 0 < whole.area < float("inf"):
        raise ValueError("it has no area")
    return whole


def _shares(shapes: Shapes, boxes: Sequence[Box], origin: Sequence[float]) -> list[Share]:
    """Of each box the share in every class that covers any of it, and in any class."""
    import shapely
    from shapely.affinity import translate

    # overlaps count once
    wholes = {name: translate(shapely.union_all(parts), *origin) for name, parts in shapes.items()}
    trees = {name: shapely.STRtree([p for p in shapely.get_parts(whole) if p.area]) for name, whole in wholes.items()}
    shares: list[Share] = []
    for box in boxes:
        area, by_class, pieces = shapely.box(*box), {}, []
        for name, tree in trees.items():
            inside = shapely.intersection(tree.geometries[tree.query(area, predicate="intersects")], area)
            if covered := float(shapely.area(inside).sum()):
                by_class[name] = min(1.0, covered / area.area)
                pieces.extend(inside)
        shares.append((by_class, min(1.0, float(shapely.union_all(pieces).area / area.area))))
    return shares


def _draw(shapes: Shapes, size: tuple[int, int], scale: Sequence[float]) -> bytes:
    """The shapes as a picture of bytes 0 and 1, row by row."""
    import shapely
    from PIL import Image, ImageDraw

    picture = Image.new("L", size)
    draw = ImageDraw.Draw(picture)
    polygons = shapely.get_parts(shapely.union_all([part for parts in shapes.values() for part in parts]))
    for polygon in sorted(polygons, key=lambda polygon: -polygon.area):  # one may lie in a hole of a larger one
        for ring, value in [(polygon.exterior, 1), *((hole, 0) for hole in polygon.interiors)]:
            draw.polygon([(x / scale[0], y / scale[1]) for x, y, *_ in ring.coords], fill=value)
    return picture.tobytes()


if __name__ == "__main__":
    serve(_answer, MEMORY)

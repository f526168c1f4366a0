"""Annotated slides of two sites, made by the tests: what is drawn is known tile by tile.

Each slide is 12 x 8 tiles with a block of stroma and one of tumour; each site has its own stains.
"""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

TILE, COLUMNS, ROWS, MPP = 56, 12, 8, 0.5
STROMA, TUMOUR = (1, 1, 5, 7), (7, 1, 11, 7)  # left, top, right, bottom in tiles
SITES = {  # densities of haematoxylin and eosin in red, green, blue
    "site_a": ((0.65, 0.70, 0.29), (0.27, 0.80, 0.53)),
    "site_b": ((0.50, 0.70, 0.50), (0.35, 0.90, 0.25)),
}
SLIDES = {"site_a": ("a1", "a2"), "site_b": ("b1", "b2")}


def draw(site: str, seed: int) -> np.ndarray:
    """(H, W, 3) uint8: eosin with few nuclei on the left, many nuclei on the right, glass around."""
    rng = np.random.default_rng(seed)
    stains = np.array(SITES[site]).T  # (3, 2)
    amount = np.zeros((ROWS * TILE, COLUMNS * TILE, 2))
    for (left, top, right, bottom), nuclei in ((STROMA, 0.05), (TUMOUR, 0.5)):
        area = slice(top * TILE, bottom * TILE), slice(left * TILE, right * TILE)
        shape = amount[area].shape[:2]
        blobs = np.kron(rng.random((shape[0] // 7, shape[1] // 7)) < nuclei, np.ones((7, 7)))
        amount[area] = np.stack((1.2 * blobs, 0.45 * (1 - blobs) + 0.1), axis=2) + rng.uniform(0, 0.1, (*shape, 2))
    light = 240 * np.exp(-amount @ stains.T) + rng.integers(-2, 3, (*amount.shape[:2], 3))
    return light.clip(0, 255).astype(np.uint8)


def ring(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    """A closed rectangle, from tiles to level-0 pixels."""
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    return [[x * TILE, y * TILE] for x, y in corners]


def feature(name: str | None, kind: str, coordinates: Any, **properties: Any) -> dict[str, Any]:
    about = {"objectType": "annotation", **({"classification": {"name": name, "color": [200, 0, 0]}} if name else {})}
    return {
        "type": "Feature", "id": "x", "geometry": {"type": kind, "coordinates": coordinates},
        "properties": {**about, **properties},
    }  # fmt: skip


def annotation() -> dict[str, Any]:
    """Tumour: a polygon with a hole of 2 x 2 tiles. Stroma: two parts, the lower one cuts the tiles of row 5 in two."""
    tumour = feature("tumour", "Polygon", [ring(*TUMOUR), ring(8, 3, 10, 5)])
    stroma = feature("stroma", "MultiPolygon", [[ring(1, 1, 5, 3)], [ring(1, 5.5, 5, 7)]])
    others = [
        feature("Ignore*", "Polygon", [ring(1, 1, 5, 7)]),
        feature(None, "Polygon", [ring(0, 0, 12, 8)]),
        feature("tumour", "Point", [5, 5]),
        feature("tumour", "Polygon", [ring(1, 1, 5, 7)], objectType="detection"),
    ]
    return {"type": "FeatureCollection", "features": [tumour, stroma, *others]}


def expected() -> dict[tuple[int, int], str]:
    """(column, row) -> class, `half` or `none` of every tile with tissue, by hand."""
    found = {(c, r): "tumour" for c in range(7, 11) for r in range(1, 7)}
    found |= {(c, r): "none" for c in (8, 9) for r in (3, 4)}  # the hole
    found |= {(c, r): "stroma" for c in range(1, 5) for r in (1, 2, 6)}
    return found | {(c, 5): "half" for c in range(1, 5)} | {(c, r): "none" for c in range(1, 5) for r in (3, 4)}


def write_cohort_slides(root: Path) -> Path:
    """`root/slides/SITE/NAME.tif` and `root/annotations/NAME.geojson`."""
    from patchgen.slides.heatmap import write_pyramid

    (root / "annotations").mkdir(parents=True)
    for site, names in SLIDES.items():
        (root / "slides" / site).mkdir(parents=True)
        for name in names:
            write_pyramid(root / "slides" / site / f"{name}.tif", draw(site, int(name[1])), (MPP, MPP))
            (root / "annotations" / f"{name}.geojson").write_text(json.dumps(annotation()))
    return root


@contextmanager
def undrawn() -> Iterator[None]:
    """Maps are not drawn over their slides, which takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchgen.slides.heatmap.overlay", lambda small, *_: Image.fromarray(small))
        yield


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))

"""Predicted tiles as GeoJSON, which QuPath (0.4 and newer) imports by drag and drop.

One feature per tile: its square in level-0 pixels, the predicted class with a colour, and every probability as a
measurement. GeoJSON is meant for geographic coordinates, but QuPath reads them as pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from patchgen.common.files import replacing
from patchgen.slides.scan import TilePrediction

# Okabe and Ito's colour-blind safe colours (2008), without black; further classes repeat them
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))


def feature(tile: TilePrediction, classes: Sequence[str]) -> dict[str, Any]:
    """One tile; its ring runs counter-clockwise in GeoJSON's sense (y up) and ends where it began."""
    left, top, right, bottom = tile.box
    measurements = {f"p {name}": p for name, p in zip(classes, tile.probabilities, strict=True)}
    measurements["tissue"] = tile.tissue
    if tile.mask is not None:
        measurements["mask mean"] = tile.mask
    if tile.unlike_training is not None:
        measurements["unlike training"] = float(tile.unlike_training)
    colour = COLOURS[list(classes).index(tile.label) % len(COLOURS)]
    ring = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {
            "objectType": "tile",
            "classification": {"name": tile.label, "color": list(colour)},
            "measurements": measurements,
        },
    }


def write_geojson(path: str | Path, tiles: Iterable[TilePrediction], classes: Sequence[str]) -> None:
    """Write the features one by one, without holding them in memory."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.write('{"type": "FeatureCollection", "features": [')
        for i, tile in enumerate(tiles):
            stream.write(("," if i else "") + "\n" + json.dumps(feature(tile, classes)))
        stream.write("\n]}\n")

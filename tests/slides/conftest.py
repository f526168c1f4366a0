"""A slide made by the test: glass, two blocks of tissue, a speck and a hole, as a tiled pyramid for OpenSlide."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from patchgen.cli import main

PINK, VIOLET = (225, 130, 180), (120, 70, 160)
STEP, COLUMNS, ROWS = 64, 21, 14  # the slide is 13 pixels wider and higher than whole tiles
BLOCKS = {"pink": (2, 3, 8, 9), "violet": (11, 4, 18, 12)}  # left, top, right, bottom in tiles
MPP = 0.5


@dataclass(frozen=True)
class Planted:
    path: Path
    pixels: np.ndarray  # (H, W, 3)
    tissue: np.ndarray  # (H, W) bool: the blocks; the hole counts as tissue, the speck does not
    tiles: dict[tuple[int, int], str]  # (column, row) -> colour


def draw_slide() -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], str]]:
    rng = np.random.default_rng(3)
    height, width = ROWS * STEP + 13, COLUMNS * STEP + 13
    pixels = np.full((height, width, 3), (244, 243, 245)) + rng.integers(-3, 4, (height, width, 3))
    tissue, tiles = np.zeros((height, width), dtype=bool), {}
    for (name, (left, top, right, bottom)), colour in zip(BLOCKS.items(), (PINK, VIOLET), strict=True):
        area = slice(top * STEP, bottom * STEP), slice(left * STEP, right * STEP)
        tissue[area] = True
        pixels[area] = np.array(colour) + rng.integers(-15, 16, (*tissue[area].shape, 3))
        tiles |= {(c, r): name for r in range(top, bottom) for c in range(left, right)}
    pixels[5 * STEP + 20 : 5 * STEP + 40, 4 * STEP + 20 : 4 * STEP + 40] = 243  # a hole in the pink block
    pixels[20:36, 15 * STEP : 15 * STEP + 16] = PINK  # a speck on the glass
    return pixels.astype(np.uint8), tissue, tiles


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    pytest.importorskip("openslide")
    from patchgen.slides.heatmap import write_pyramid

    path = tmp_path_factory.mktemp("slides") / "biopsy.tif"
    pixels, tissue, tiles = draw_slide()
    write_pyramid(path, pixels, (MPP, MPP))
    return Planted(path, pixels, tissue, tiles)


@pytest.fixture(scope="session")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Annotated slides of two sites (`cohort.py`): `slides/SITE/NAME.tif` and `annotations/NAME.geojson`."""
    pytest.importorskip("openslide")
    pytest.importorskip("shapely")
    from .cohort import write_cohort_slides

    return write_cohort_slides(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="session")
def tiles(cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All labelled tiles of these slides, with their manifest."""
    out = tmp_path_factory.mktemp("cut") / "tiles"
    words = ["--annotations", str(cohort / "annotations"), "--out", str(out), "--tile", "56"]
    assert main(["slide", "tiles", str(cohort / "slides"), *words]) == 0
    return out

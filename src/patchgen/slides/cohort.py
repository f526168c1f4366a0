"""Many slides at a glance: a CSV with a row per slide, and one page with their thumbnails and maps.

    page = write_cohort(out, [out / "a", out / "b"], {"c.svs": "cannot use slide c.svs: ..."})

Everything comes from the finished folders of the slides, so it can be regenerated at any time. A slide's numbers are
means and counts over its tiles, not a diagnosis of the patient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchgen.common.csv_files import write_csv
from patchgen.common.untrusted import read_json
from patchgen.pages.page import Cell, file_address, render, write_page
from patchgen.slides.heatmap import MASK, TILE_NOTICE, save_png
from patchgen.slides.scan import read_tiles
from patchgen.slides.tiles import TileGrid

TABLE, PAGE, THUMBNAIL = "cohort.csv", "index.html", "thumbnail.png"
SIDE = 512  # pixels of a thumbnail's longer side, at most


@dataclass(frozen=True)
class SlideSummary:
    """Summary of a slide's tiles."""

    folder: Path
    slide: str
    model: str  # digest
    tiles: int
    tissue: float  # square millimetres
    classes: tuple[str, ...]
    shares: tuple[float, ...]  # of the tiles, by predicted class
    means: tuple[float, ...]  # of the tiles' probabilities
    unlike: float | None  # share of the tiles that are unlike the training images
    mask: float | None  # mean of the selection mask
    maps: dict[str, str]  # what -> picture

    @property
    def best(self) -> int:
        """The class with the largest mean probability."""
        return int(np.argmax(self.means))


def summarise(folder: Path) -> SlideSummary:
    """The summary of a finished slide's folder."""
    facts = read_json(folder / "slide.json")
    classes, tiles = tuple(facts["classes"]), list(read_tiles(folder / "tiles.csv", facts["classes"]))
    labels = [tile.label for tile in tiles]
    unlike = [tile.unlike_training for tile in tiles if tile.unlike_training is not None]
    masks = [tile.mask for tile in tiles if tile.mask is not None]
    area = (facts["tile"] * facts["mpp"] / 1000) ** 2  # of a tile
    return SlideSummary(
        folder, facts["slide"], facts["model"], len(tiles), sum(tile.tissue for tile in tiles) * area, classes,
        tuple(labels.count(name) / len(labels) for name in classes),
        tuple(float(p) for p in np.mean([tile.probabilities for tile in tiles], axis=0)),
        float(np.mean(unlike)) if unlike else None,
        float(np.mean(masks)) if masks else None,
        {name: files[0] for name, files in facts["files"].items()},
    )  # fmt: skip


def save_thumbnail(folder: Path, small: np.ndarray, grid: TileGrid) -> None:
    """The slide as a small picture that has the shape of its maps."""
    width, height = grid.map_size
    picture = Image.fromarray(small[:height, :width])
    picture.thumbnail((SIDE, SIDE))
    save_png(folder / THUMBNAIL, picture)


def write_cohort(out: Path, folders: Sequence[Path], failures: Mapping[str, str]) -> Path:
    """Write the table and page of finished slides and of failures with their reasons; returns the page."""
    slides = [summarise(folder) for folder in folders]
    classes = slides[0].classes
    header = ["slide", "folder", "tiles", "tissue_mm2", "label", "mean_probability", "mask_mean", "unlike_training",
              *(f"mean_p_{name}" for name in classes), *(f"share_{name}" for name in classes), "error"]  # fmt: skip
    empty = [""] * (len(header) - 2)
    rows = [[*_cells(slide), ""] for slide in slides]
    rows += [[Path(path).name, *empty, why.strip().splitlines()[-1]] for path, why in failures.items()]
    write_csv(out / TABLE, header, rows, people=True)
    return write_page(out / PAGE, _page(slides, failures))


def _cells(slide: SlideSummary) -> list[str]:
    optional = ["" if value is None else f"{value:.6f}" for value in (slide.mask, slide.unlike)]
    best = [slide.classes[slide.best], f"{slide.means[slide.best]:.6f}"]
    numbers = [f"{value:.6f}" for value in (*slide.means, *slide.shares)]
    return [slide.slide, slide.folder.name, str(slide.tiles), f"{slide.tissue:.4f}", *best, *optional, *numbers]


def _page(slides: Sequence[SlideSummary], failures: Mapping[str, str]) -> str:
    return render(
        "cohort.html",
        title=f"{len(slides)} slide{'s' * (len(slides) > 1)}, model {slides[0].model}",
        table_file=TABLE,
        notice=TILE_NOTICE,
        head=["slide", "tiles", "mm²", *slides[0].classes],
        rows=[_row(slide) for slide in slides],
        slides=[_section(slide) for slide in slides],
        failures=[(Path(path).name, why.strip().splitlines()[-1]) for path, why in failures.items()],
    )


def _row(slide: SlideSummary) -> list[object]:
    name = Cell(slide.slide, link=f"#{file_address(slide.folder.name)}")
    means = [Cell(f"{mean:.3f}", "best" if i == slide.best else "") for i, mean in enumerate(slide.means)]
    return [name, slide.tiles, f"{slide.tissue:.2f}", *means]


def _section(slide: SlideSummary) -> dict[str, object]:
    """The section of a slide on the page."""
    folder = slide.folder.name
    shares = ", ".join(f"{name} {share:.1%}" for name, share in zip(slide.classes, slide.shares, strict=True))
    unlike = f"; {slide.unlike:.1%} unlike the training images" if slide.unlike is not None else ""
    return {
        "id": file_address(folder),
        "name": slide.slide,
        "text": f"{slide.tiles} tiles: {shares}{unlike}.",
        "thumbnail": file_address(folder, THUMBNAIL),
        "maps": [
            ("mean of the selection mask" if name == MASK else name, file_address(folder, file))
            for name, file in slide.maps.items()
        ],
    }

"""Many slides at a glance: a CSV with a row per slide or patient, and one page with their thumbnails and maps.

Neighbouring tiles are alike, so blocks of `BLOCK` x `BLOCK` tiles are resampled (bootstrap, 95 %). The interval says
how much a number depends on which of the tissue was scanned, not whether the model is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from patchgen.common.files import write_csv
from patchgen.common.untrusted import read_json
from patchgen.pages.page import Cell, file_address, render, write_page
from patchgen.slides.heatmap import MASK, TILE_NOTICE, read_tiles, save_png
from patchgen.slides.slide import TileGrid

TABLE, PATIENTS, PAGE, THUMBNAIL = "cohort.csv", "patients.csv", "index.html", "thumbnail.png"
SIDE = 512  # pixels of a thumbnail's longer side, at most
BLOCK, RESAMPLES = 4, 1000  # tiles per side of a resampled block; times that blocks are drawn


@dataclass(frozen=True, eq=False)
class Rates:
    """Of the tiles of a slide or patient: each class's mean probability, and the share that it is predicted for."""

    blocks: np.ndarray  # (B, 1 + 2C): tiles of a block, sums of their probabilities, tiles of each predicted class

    @property
    def tiles(self) -> int:
        return round(self.blocks[:, 0].sum())

    @cached_property
    def values(self) -> np.ndarray:
        """(2, C): means, shares."""
        sums = self.blocks.sum(0)
        return (sums[1:] / sums[0]).reshape(2, -1)

    @property
    def best(self) -> int:
        """The class with the largest mean probability."""
        return int(np.argmax(self.values[0]))

    @cached_property
    def interval(self) -> np.ndarray:
        """(2, 2, C): lower and upper ends of the 95 % intervals of the values; NaN with a single block."""
        count = len(self.blocks)
        if count < 2:
            return np.full((2, *self.values.shape), np.nan)
        drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)  # (R, B)
        sums = drawn @ self.blocks
        return np.quantile(sums[:, 1:] / sums[:, :1], (0.025, 0.975), axis=0).reshape(2, *self.values.shape)


def rates(tiles: pd.DataFrame, classes: Sequence[str]) -> Rates:
    """Sums over blocks of neighbouring tiles."""
    predicted = tiles["label"].to_numpy()[:, None] == np.array(classes, dtype=object)
    numbers = np.column_stack([np.ones(len(tiles)), tiles[[f"p_{name}" for name in classes]], predicted])
    block = [tiles["column"].to_numpy() // BLOCK, tiles["row"].to_numpy() // BLOCK]
    return Rates(pd.DataFrame(numbers.astype(float)).groupby(block).sum().to_numpy())


@dataclass(frozen=True, eq=False)
class SlideSummary:
    folder: Path
    slide: str
    model: str  # digest
    tissue: float  # square millimetres
    classes: tuple[str, ...]
    rates: Rates
    unlike: float  # share of the tiles that are unlike the training images; NaN if the model does not say
    mask: float  # mean of the selection mask; NaN without one
    maps: dict[str, str]  # what -> picture


def summarise(folder: Path) -> SlideSummary:
    facts, tiles = read_json(folder / "slide.json"), read_tiles(folder / "tiles.csv")
    classes, area = tuple(facts["classes"]), (facts["tile"] * facts["mpp"] / 1000) ** 2  # of a tile
    unlike, mask = (tiles[name].astype(float).mean() for name in ("unlike_training", "mask"))
    maps, tissue = {name: files[0] for name, files in facts["files"].items()}, tiles["tissue"].sum() * area
    slide, model = facts["slide"], facts["model"]
    return SlideSummary(folder, slide, model, tissue, classes, rates(tiles, classes), unlike, mask, maps)


def save_thumbnail(folder: Path, small: np.ndarray, grid: TileGrid) -> None:
    """The slide as a small picture that has the shape of its maps."""
    width, height = grid.map_size
    picture = Image.fromarray(small[:height, :width])
    picture.thumbnail((SIDE, SIDE))
    save_png(folder / THUMBNAIL, picture)


def write_cohort(
    out: Path, folders: Sequence[Path], failures: Mapping[str, str], patients: Mapping[str, str] | None = None
) -> Path:
    """Write the tables and page of finished slides and failures; `patients` by the slides' names, or stems."""
    slides = [summarise(folder) for folder in folders]
    classes = slides[0].classes
    failed = [(Path(path).name, why.strip().splitlines()[-1]) for path, why in failures.items()]
    names = [f"{what}_{name}{end}" for end in ("", "_low", "_high") for what in ("mean_p", "share") for name in classes]
    header = ["slide", "folder", "tiles", "tissue_mm2", "label", "mean_probability", "mask_mean", "unlike_training"]
    rows = [[*_cells(slide), ""] for slide in slides]
    rows += [[name, *[""] * (len(header) + len(names) - 1), reason] for name, reason in failed]
    write_csv(out / TABLE, [*header, *names, "error"], rows, people=True)
    groups: dict[str, list[SlideSummary]] = {}
    for slide in slides:  # one of no patient is left out
        if patient := (patients or {}).get(slide.slide) or (patients or {}).get(Path(slide.slide).stem):
            groups.setdefault(patient, []).append(slide)
    # each slide counts by its tiles
    pooled = [(name, of, Rates(np.concatenate([slide.rates.blocks for slide in of]))) for name, of in groups.items()]
    if pooled:
        rows = [[name, str(len(of)), str(rate.tiles), classes[rate.best], *_numbers(rate)] for name, of, rate in pooled]
        write_csv(out / PATIENTS, ["patient", "slides", "tiles", "label", *names], rows, people=True)
    return write_page(out / PAGE, _page(slides, failed, pooled))


def _numbers(rate: Rates, *more: float) -> list[str]:
    numbers = [*more, *rate.values.flat, *rate.interval.flat]
    return ["" if np.isnan(value) else f"{value:.6f}" for value in numbers]


def _cells(slide: SlideSummary) -> list[str]:
    rates = slide.rates
    about = [slide.slide, slide.folder.name, str(rates.tiles), f"{slide.tissue:.4f}", slide.classes[rates.best]]
    return [*about, *_numbers(rates, rates.values[0, rates.best], slide.mask, slide.unlike)]


def _page(
    slides: Sequence[SlideSummary],
    failures: Sequence[tuple[str, str]],
    pooled: Sequence[tuple[str, list[SlideSummary], Rates]],
) -> str:
    classes = slides[0].classes
    rows = [
        [Cell(slide.slide, link=f"#{file_address(slide.folder.name)}"), slide.rates.tiles, f"{slide.tissue:.2f}",
         *_means(slide.rates)] for slide in slides
    ]  # fmt: skip
    return render(
        "cohort.html",
        title=f"{len(slides)} slide{'s' * (len(slides) > 1)}, model {slides[0].model}",
        table_file=TABLE,
        notice=TILE_NOTICE,
        head=["slide", "tiles", "mm²", *classes],
        rows=rows,
        patients_head=["patient", "slides", "tiles", *classes],
        patients=[[name, len(of), rate.tiles, *_means(rate)] for name, of, rate in pooled],
        slides=slides,
        failures=failures,
        thumbnail=THUMBNAIL,
        mask=MASK,
        address=file_address,
    )


def _means(rate: Rates) -> list[Cell]:
    """Mean probability of each class with its interval, the largest marked."""
    texts = [f"{mean:.3f}" for mean in rate.values[0]]
    low, high = rate.interval[:, 0]
    if not np.isnan(low).any():
        texts = [f"{text} ({a:.2f} to {b:.2f})" for text, a, b in zip(texts, low, high, strict=True)]
    return [Cell(text, "best" if i == rate.best else "") for i, text in enumerate(texts)]

"""Predict the tiles of a slide in batches, into a resumable CSV file.

A resumed pass uses the same batches as an uninterrupted one, and so produces the same file.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from patchgen.common.files import not_through_links, replacing
from patchgen.common.reading import batches
from patchgen.predict.predictor import Prediction, Predictor
from patchgen.slides.slide import Slide, TileGrid
from patchgen.slides.tissue import Window

COLUMNS = ("column", "row", "x", "y", "width", "height", "tissue", "label", "confidence", "mask", "unlike_training")
Tick = Callable[[int], None] | None


def scan(
    predictor: Predictor, slide: Slide, grid: TileGrid, windows: Sequence[Window], file: Path, batch: int = 64,
    tick: Tick = None,
) -> None:  # fmt: skip
    """Predict the tiles missing from `file`, and append them batch by batch."""
    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow([*COLUMNS, *(f"p_{name}" for name in predictor.classes)])
    done = _resume(file, header.getvalue().encode(), windows, batch)
    if tick and done:
        tick(done)
    with open(file, "a", newline="", encoding="utf-8", opener=not_through_links) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        for part, pixels in read_batches(slide, grid, windows[done:], predictor, batch, tick):
            writer.writerows(_row(*pair, grid) for pair in zip(part, predictor.score(pixels), strict=True))
            stream.flush()


def read_batches(
    slide: Slide, grid: TileGrid, windows: Sequence[Window], predictor: Predictor, batch: int, tick: Tick = None
) -> Iterator[tuple[Sequence[Window], list[np.ndarray]]]:
    """Batches of tiles as the model reads them, (S, S, 3) uint8; the next batch is read while one is used."""
    size = predictor.config.image_size

    def read(window: Window) -> np.ndarray:
        return slide.read(window.corner, grid.step, (size, size), predictor.interpolation)

    yield from batches(windows, read, batch, tick, each=True)


def read_tiles(file: Path) -> pd.DataFrame:
    """The tiles of a CSV; `mask` and `unlike_training` are NaN where the model has none."""
    optional = {name: [""] for name in ("mask", "unlike_training")}
    return pd.read_csv(file, keep_default_na=False, na_values=optional, dtype={"label": str})


def _row(window: Window, prediction: Prediction, grid: TileGrid) -> list[Any]:
    left, top, right, bottom = grid.box(window.column, window.row)
    mask = "" if prediction.mask is None else f"{prediction.mask.mean():.6f}"
    unlike = "" if prediction.unlike_training is None else str(prediction.unlike_training).lower()
    return [
        window.column, window.row, left, top, right - left, bottom - top, f"{window.tissue:.4f}", prediction.label,
        f"{prediction.confidence:.6f}", mask, unlike, *(f"{p:.6f}" for p in prediction.probabilities),
    ]  # fmt: skip


def _resume(file: Path, header: bytes, windows: Sequence[Window], batch: int) -> int:
    """Truncate the file to its last complete batch and return its number of tiles; a new file gets its header."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if not lines or not lines[0].endswith(b"\n"):
        lines = [header]
    whole = [line for line in lines[1:] if line.endswith(b"\n")]  # a kill may leave half a line
    predicted = [tuple(line.decode().split(",", 2)[:2]) for line in whole]
    expected = [(str(window.column), str(window.row)) for window in windows[: len(whole)]]
    if lines[0] != header or predicted != expected:
        raise ValueError(f"{file} belongs to other tiles or another model; remove it, or choose another --out")
    done = len(whole) if len(whole) == len(windows) else len(whole) // batch * batch
    with replacing(file) as temporary:
        temporary.write_bytes(b"".join(lines[: 1 + done]))
    return done

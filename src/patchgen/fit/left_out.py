"""Which images of its left-out site a run classifies correctly, for comparing methods image by image.

A run records only its accuracy there. The images are predicted again, and the result is stored in the run folder for
repeated fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from patchgen.common.files import replacing
from patchgen.common.progress import Progress
from patchgen.fit.calibrate import read
from patchgen.predict.predictor import load_run
from patchgen.runs.folder import RunFolder
from patchgen.tasks import Fold

if TYPE_CHECKING:
    from patchgen.predict.predictor import Checkpoint

NAME = "left_out.npy"


def right_at(run: RunFolder, fold: Fold, checkpoint: Checkpoint, bar: Progress) -> np.ndarray:
    """(n,) bool: whether each image of the unseen site got its class, in the order of `rows_of`."""
    rows, file = rows_of(fold), run.path / f"{checkpoint}_{NAME}"
    known = _load(file, len(rows))
    if known is not None:
        bar.advance(len(rows))
        return known
    predictor = load_run(run.path, checkpoint)
    logits, _ = read(predictor, predictor.store(fold.table.files), rows, bar.tick)
    right: np.ndarray = logits.argmax(1).numpy() == fold.truth[rows]
    with replacing(file) as temporary, open(temporary, "wb") as stream:
        np.save(stream, right)
    return right


def rows_of(fold: Fold) -> np.ndarray:
    """The rows of the unseen site, in the order of the table."""
    return np.sort(np.concatenate(list(fold.test.values())))


def groups_of(folds: Sequence[Fold]) -> list[np.ndarray] | None:
    """The patient of each row of `rows_of`, for each fold; None if the data has none."""
    group = folds[0].table.group
    return [np.array(group)[rows_of(fold)] for fold in folds] if group else None


def _load(file: object, count: int) -> np.ndarray | None:
    try:
        found: np.ndarray = np.load(str(file), allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError):  # missing or damaged
        return None
    return found if found.shape == (count,) and found.dtype == np.bool_ else None

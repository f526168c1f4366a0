"""What each run predicted at the site that it left out: for comparing methods, and for calibrating "unknown"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patchgen.common.progress import Progress
from patchgen.fit.calibrate import read
from patchgen.predict.predictor import Checkpoint, load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import Predictions, read_predictions, save_predictions
from patchgen.tasks import Fold


def predictions_at(run: RunFolder, fold: Fold, checkpoint: Checkpoint) -> Predictions:
    """The predictions for the unseen site, in the order of `rows_of`.

    Runs save them; those of earlier versions are loaded, predict once more, and save them too.
    """
    rows = rows_of(fold)
    saved = read_predictions(run.path, checkpoint)
    if saved is not None and np.array_equal(saved.rows, rows) and np.array_equal(saved.label, fold.truth[rows]):
        return saved
    predictor = load_run(run.path, checkpoint)
    with Progress(f"predicting {fold.unseen}", len(rows)) as bar:
        logits, _ = read(predictor, predictor.store(fold.table.files), rows, bar.tick)
    predictions = Predictions(rows, fold.truth[rows], logits.softmax(1).float().numpy())
    save_predictions(run.path, checkpoint, predictions, fold.classes)
    return predictions


def right(predictions: Predictions) -> np.ndarray:
    """(n,) bool: whether each image got its class."""
    correct: np.ndarray = predictions.probabilities.argmax(1) == predictions.label
    return correct


def rows_of(fold: Fold) -> np.ndarray:
    """The rows of the unseen site, in the order of the table."""
    return np.sort(np.concatenate(list(fold.test.values())))


def groups_of(folds: Sequence[Fold]) -> list[np.ndarray] | None:
    """The patient of each row of `rows_of`, for each fold; None if the data has none."""
    group = folds[0].table.group
    return [np.array(group)[rows_of(fold)] for fold in folds] if group else None

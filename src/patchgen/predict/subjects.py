"""Runs opened for diagnosis: the classifier, the rows it is tested on, and the truth if known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.common.files import expanded
from patchgen.data.augment import normalize
from patchgen.data.images import ImageStore
from patchgen.data.oracle import true_masks
from patchgen.data.splits import read_splits
from patchgen.data.table import fingerprint, read_table
from patchgen.methods import method_class
from patchgen.model.classifier import Classifier
from patchgen.predict.predictor import Checkpoint, Predictor, load_run
from patchgen.runs.folder import RunFolder, run_name
from patchgen.tasks import Fold, make_fold


@dataclass(frozen=True)
class Subject:
    """One run under examination."""

    name: str
    run: str  # the run folder's name
    predictor: Predictor
    fold: Fold
    store: ImageStore
    folder: RunFolder | None = None

    @property
    def model(self) -> Classifier:
        return self.predictor.model

    @property
    def patches(self) -> int:
        return self.model.grid[0] * self.model.grid[1]

    @property
    def has_mask(self) -> bool:
        return self.model.has_mask

    @cached_property
    def truth(self) -> np.ndarray | None:
        """(N,P) bool: C* of every row, None if it is not known."""
        return true_masks(self.fold.table, self.model.grid)

    def pixels(self, rows: np.ndarray) -> Tensor:
        """(B,3,S,S) in [0,1]."""
        return self.store.load(rows).to(self.predictor.device).float() / 255

    def normalised(self, pixels: Tensor) -> Tensor:
        return normalize(pixels, self.model.backbone.mean, self.model.backbone.std)

    @torch.no_grad()
    def probabilities(self, pixels: Tensor) -> Tensor:
        return self.model(self.normalised(pixels)).logits.float().softmax(1)

    @torch.no_grad()
    def features(self, rows: np.ndarray) -> np.ndarray:
        """(B,D): the input of the head."""
        return self.model(self.normalised(self.pixels(rows))).features.float().cpu().numpy()

    @torch.no_grad()
    def selected_share(self, rows: np.ndarray) -> np.ndarray:
        """(B,): share of patches with a mask of at least 0.5."""
        mask = self.model(self.normalised(self.pixels(rows))).selection()
        return (mask >= 0.5).float().mean(1).cpu().numpy()


def open_subjects(
    runs: Sequence[str], data: str | None, checkpoint: Checkpoint = "selected", **device: Any
) -> list[Subject]:
    """The runs in the given order; all must belong to the fold of the first.

    Args:
        data: Current path of the data, if it has changed.
    """
    if len({Path(run).resolve() for run in runs}) < len(runs):
        raise ValueError("the same run is named twice; leave it out of --against")
    folders, fold = open_runs(runs, data)
    subjects = []
    for folder, name in zip(folders, _names(folders), strict=True):
        predictor = load_run(folder.path, checkpoint, **device)
        check_classes(folder, predictor, fold)
        store = predictor.store(fold.table.files)
        subjects.append(Subject(name, folder.path.resolve().name, predictor, fold, store, folder))
    return subjects


def open_runs(runs: Sequence[str], data: str | None) -> tuple[list[RunFolder], Fold]:
    """Finished runs of one fold on the same data, and the fold."""
    folders = [_finished(run) for run in runs]
    config = folders[0].config
    fold = make_fold(replace(config, data=data) if data else config)
    for folder in folders:
        _check_same_domain(folder, folders[0])
        _check_data(folder, fold, data)
    return folders, fold


def _finished(run: str) -> RunFolder:
    folder = RunFolder.open(run)
    if not folder.done:
        raise ValueError(f"{run} is not finished (it has no file `done`); the same `patchgen train` command resumes it")
    folder.require_plugins()
    if method_class(folder.config.method).mask == "true":
        raise ValueError(
            f"{run}: method {folder.config.method!r} uses the true mask, an upper bound and not a "
            "classifier of its own; leave it out"
        )
    return folder


def _check_same_domain(folder: RunFolder, first: RunFolder) -> None:
    if folder.config.unseen != first.config.unseen:
        raise ValueError(
            f"{folder.path} left out {folder.config.unseen!r}, but {first.path} left out {first.config.unseen!r}; "
            "only runs of one fold can be compared or averaged"
        )


def _check_data(folder: RunFolder, fold: Fold, data: str | None) -> None:
    """Check that the images are those of the run, by its list of images and, if known, by their sizes.

    Args:
        data: Current path of the data as given by the user; the original path may no longer exist.

    Raises:
        ValueError: they differ.
    """
    config = folder.config
    try:
        read_splits(folder.path / "splits.csv", fold.table)
        known = folder.path.resolve().name == run_name(
            config, fingerprint(fold.table)
        )  # no need to look at its own data
        if not known and not (data and not expanded(config.data).exists()):
            there = read_table(config.data, benchmark=config.benchmark, options=config.options)
            if there.root != fold.table.root and fingerprint(there) != fingerprint(fold.table):
                raise ValueError(f"the images at {there.root} have the same names, but other contents")
    except ValueError as error:
        raise ValueError(
            f"{folder.path} was not trained on the data at {fold.table.root} ({error}); "
            "use runs on the same data, and give --data if its path has changed"
        ) from error


def check_classes(folder: RunFolder, predictor: Predictor, fold: Fold) -> None:
    if predictor.classes != fold.classes:
        raise ValueError(
            f"{folder.path} was trained for the classes {', '.join(predictor.classes)}, but the data have "
            f"{', '.join(fold.classes)}; point --data at the data of the run"
        )


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The method, with its pool if it was set; if two are the same, followed by the run's name."""
    plain = [f"{f.config.method}@{f.config.pool}" if f.config.pool else f.config.method for f in folders]
    ids = [folder.path.resolve().name[:6] for folder in folders]
    return [name if plain.count(name) == 1 else f"{name} {i}" for name, i in zip(plain, ids, strict=True)]


# Which images


def unseen_rows(fold: Fold, count: int, seed: int) -> np.ndarray:
    """Rows of the unseen domain whose class has an output, evenly over the classes."""
    if not fold.test:
        raise ValueError("the run was trained on all domains (--unseen none): it has no unseen image to diagnose with")
    rows = np.concatenate([fold.test["in"], fold.test["out"]])
    rows = rows[(fold.truth[rows] >= 0) & (fold.truth[rows] < min(fold.num_known, len(fold.classes)))]
    if not len(rows):
        raise ValueError(f"the unseen domain {fold.unseen!r} has no labelled image of a known class to diagnose with")
    return evenly(rows, fold.truth[rows], count, seed)


def geometry_rows(fold: Fold, count: int, seed: int) -> np.ndarray:
    """At most `count` rows of each domain, none of which was trained on."""
    parts = [evenly(rows, fold.truth[rows], count, seed) for rows in fold.validation.values()]
    return np.concatenate([*parts, unseen_rows(fold, count, seed)])


def evenly(rows: np.ndarray, label: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` of the rows, drawn by the seed, from each class in turn."""
    order = np.random.default_rng(seed).permutation(len(rows))
    turn = np.empty(len(rows), dtype=np.int64)  # how many of its class come before it
    for name in np.unique(label):
        of_class = order[label[order] == name]
        turn[of_class] = np.arange(len(of_class))
    return rows[order[np.argsort(turn[order], kind="stable")][:count]]

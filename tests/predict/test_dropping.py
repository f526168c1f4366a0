"""Predictions without the unselected patches: their command, and what is measured of them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchgen.cli import main
from patchgen.predict.dropping import _kept, measure_drop
from patchgen.predict.predictor import load_run
from patchgen.predict.subjects import open_subjects, unseen_rows
from patchgen.predict.throughput import ratio_of


@pytest.fixture(scope="module")
def run(tiny_run: Callable[..., Any]) -> Path:
    path: Path = tiny_run("patchgen-select").path
    return path


def test_the_command_gives_the_answers_of_the_predictor(run: Path, image_folder: Path, tmp_path: Path) -> None:
    words = [str(run), str(image_folder / "studio"), "--drop-unselected"]
    assert main(["predict", *words, "--csv", str(tmp_path / "a.csv")]) == 0
    with open(tmp_path / "a.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    predictor, whole = load_run(run).drop_unselected(), load_run(run)
    expected = list(predictor.predict([row["path"] for row in rows]))
    np.testing.assert_allclose([float(row["confidence"]) for row in rows], [p.confidence for p in expected], atol=1e-5)
    plain = list(whole.predict([row["path"] for row in rows]))
    for dropped, full in zip(expected, plain, strict=True):
        np.testing.assert_allclose(dropped.mask, full.mask, atol=1e-5)  # maps show the whole mask
    assert any(abs(a.confidence - b.confidence) > 1e-5 for a, b in zip(expected, plain, strict=True))
    assert predictor.variant != whole.variant == ""


def test_refusals(run: Path, tiny_run: Callable[..., Any], image_folder: Path) -> None:
    with pytest.raises(ValueError, match="of method patchgen-select"):
        load_run(tiny_run("patchgen").path).drop_unselected()
    with pytest.raises(ValueError, match="add --drop-unselected"):
        from patchgen.commands.predict import main as predict

        predict([str(run), str(image_folder), "--drop-after", "1"])


def test_what_is_measured(run: Path) -> None:
    [subject] = open_subjects([str(run)], None)
    rows = unseen_rows(subject.fold, 6, 0)
    found = measure_drop(subject, rows, batch=4, repeats=2)
    for name, predictor in (("whole", load_run(run)), ("dropped", load_run(run).drop_unselected())):
        labels = [p.label for p in predictor.predict([subject.fold.table.file(int(i)) for i in rows])]
        truth = [subject.fold.classes[subject.fold.truth[i]] for i in rows]
        assert found["accuracy"][name] == pytest.approx(np.mean([a == b for a, b in zip(labels, truth, strict=True)]))
    assert found["after"] == 1 and found["images"] == 6


def test_ratios_and_shares_by_hand() -> None:
    found = ratio_of([2.0, 4.0, 3.0], [1.0, 2.0, 1.0])
    assert found == {"median": 2.0, "quartiles": [2.0, 2.5], "conclusive": False}
    assert ratio_of([2.0, 4.0], [1.0, 2.0])["conclusive"]
    shown = torch.tensor([[0.9, 0.1, 0.1, 0.1], [0.9, 0.9, 0.9, 0.1], [0.9, 0.5, 0.1, 0.4]])
    assert _kept(shown, 2) == {"selected": 0.5, "batches": pytest.approx((0.75 + 0.5) / 2)}

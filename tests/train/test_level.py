"""The level of the mask: 0.5 is where a patch is read as much as the average, and what is selected suffices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.images import decode
from patchgen.data.oracle import SUITE, Oracle, true_masks
from patchgen.data.table import read_table
from patchgen.model.classifier import Output
from patchgen.predict.predictor import load_run
from patchgen.runs.tensors import load_tensors
from patchgen.tasks.metrics import mask_recovery
from patchgen.train import close
from patchgen.train.close import EVERYTHING, find_level
from patchgen.train.lifecycle import train

LABEL = np.arange(40) % 2


def masks(rows: np.ndarray, weak: float = 0.1) -> Tensor:
    """Ten patches, two of which are read."""
    mask = torch.full((len(rows), 10), weak)
    mask[:, :2] = 0.8
    return mask


def reader(needs: int, weak: float = 0.1) -> Callable[[np.ndarray, Tensor | None], Output]:
    """A classifier that is right while the first `needs` patches of an image are there."""

    def classify(rows: np.ndarray, mask: Tensor | None) -> Output:
        used = masks(rows, weak) if mask is None else mask
        right = torch.from_numpy(LABEL[rows])
        answer = torch.where((used[:, :needs] > 0).all(1), right, 1 - right)
        logits = torch.nn.functional.one_hot(answer, 2).float()
        return Output(logits, logits, used, own_mask=used)

    return classify


def shown(level: tuple[float, float], mask: Tensor) -> Tensor:
    read = mask**2 / (mask**2).mean(1, keepdim=True)
    return torch.sigmoid(level[0] * read.log() + level[1])


def test_half_is_the_average_patch_and_a_selected_one_is_shown_as_strong() -> None:
    level = find_level(reader(needs=2), np.arange(40), LABEL, gain=2)
    assert level[1] == 0
    found = shown(level, masks(np.arange(1)))
    torch.testing.assert_close(found[0, :2], torch.full((2,), torch.tensor(2.0).sigmoid()))
    assert (found[0, 2:] < 0.5).all()


def test_what_is_selected_suffices() -> None:
    """All ten patches are needed, and the eight weak ones are not far below the average: 0.5 moves below them."""
    level = find_level(reader(needs=10, weak=0.4), np.arange(40), LABEL, gain=2)
    assert (shown(level, masks(np.arange(1), 0.4)) >= 0.5).all()
    assert find_level(reader(needs=10, weak=1e-3), np.arange(40), LABEL, gain=2) == EVERYTHING


def test_a_flat_mask_selects_everything() -> None:
    assert find_level(reader(needs=2, weak=0.8), np.arange(40), LABEL, gain=2) == EVERYTHING


def test_a_run_stores_its_level_and_records_both_sides(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("patchgen-select")
    for name in ("selected", "swad"):
        tensors, _ = load_tensors(run.checkpoint(name))
        assert tensors["select.level"][0] > 0
        predictor = load_run(run.path, name)
        torch.testing.assert_close(predictor.model.select.level.cpu(), tensors["select.level"])


def test_the_level_does_not_depend_on_dropout(tiny_run: Callable[..., Any], monkeypatch: Any) -> None:
    """The classifier is asked as it predicts, not as it trains."""
    asked, find = [], close.find_level

    def watched(classify: Any, rows: np.ndarray, *more: Any) -> tuple[float, float]:
        asked.append(torch.equal(classify(rows[:2], None).logits, classify(rows[:2], None).logits))
        return find(classify, rows, *more)

    monkeypatch.setattr(close, "find_level", watched)
    tiny_run("patchgen-select", dropout=0.5, seed=11)
    assert asked == [True] * 3  # the untrained mask, the selected checkpoint, and the average


def test_an_oracle_run_records_the_mask_before_and_after(tmp_path: Any) -> None:
    """Before: the same of the saved checkpoint, whose level is set back to none."""
    data = Oracle(replace(SUITE["oracle-easy"], per_class=6)).write(tmp_path / "easy") / "images"
    settings = {"backbone": "tiny", "image_size": 84, "steps": 3, "batch_per_domain": 4, "augment": False}
    run = train(Config(data=str(data), unseen="mist", method="patchgen-select", **settings), tmp_path, quiet=True)
    [test] = run.records("test")
    assert {"iou", "kept", "auroc"} <= set(test["mask"]) and {"true_mask", "random_mask"} <= set(test)
    predictor, table = load_run(run.path, "selected"), read_table(data)
    predictor.model.select.level.zero_()
    rows = table.rows_of("mist")
    with torch.inference_mode():
        mask = predictor.model(predictor.inputs([decode(table.file(row), 84) for row in rows])).mask.cpu().numpy()
    before = mask_recovery(mask, true_masks(table, predictor.model.grid)[rows])
    assert test["mask_before_level"] == {
        name: pytest.approx(float(np.nanmean(before[name])), abs=1e-6) for name in ("iou", "kept")
    }

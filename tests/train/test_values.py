"""Named values of steps: means, the first step that is not finite, and the error that names its images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from patchgen.runs.folder import RunFolder
from patchgen.train.values import NEVER, StepValues, diverged, not_finite

NAN = float("nan")


def test_means_count_each_name_by_itself() -> None:
    values = StepValues(torch.device("cpu"))
    values.add({"main": torch.tensor(1.0), "rare": torch.tensor(5.0)}, 0)
    values.add({"main": torch.tensor(2.0)}, 1)
    assert values.means() == {"main": 1.5, "rare": 5.0} and int(values.first_bad) == NEVER
    assert values.means(lambda each: 2 * each) == {"main": 3.0, "rare": 10.0}
    values.clear()
    assert values.means() == {}  # as with a method that trains nothing


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_the_first_bad_step_is_remembered(bad: float) -> None:
    values = StepValues(torch.device("cpu"))
    for step, value in enumerate([1.0, bad, 1.0, NAN]):
        values.add({"main": torch.tensor(value), "other": torch.tensor(0.0)}, step)
    assert int(values.first_bad) == 1


def test_what_is_not_finite() -> None:
    model = nn.Linear(2, 2)
    assert not_finite({"main": 1.0}, model) == []
    assert not_finite({"main": 1.0, "L_ms": NAN}, model) == ["L_ms"]
    model.bias.data[0] = NAN
    assert not_finite({"main": 1.0}, model) == ["weights"]
    assert not_finite({"main": 1.0}, model.requires_grad_(False)) == []  # nothing is trained


def test_the_error_names_the_place_and_some_images(tmp_path: Path) -> None:
    where, images = {"stage": 1, "epoch": 2, "step": 3}, [f"{i}.png" for i in range(6)]
    text = str(diverged(RunFolder(tmp_path), where, ["main"], images, 0.1))
    assert "diverged at stage 1, epoch 2, step 3: main is not finite; lower --lr (now 0.1)" in text
    assert "0.png, 1.png, 2.png, 3.png, ... (all" in text and str(tmp_path) in text
    assert json.loads((tmp_path / "diverged.json").read_text()) == {**where, "values": ["main"], "images": images}

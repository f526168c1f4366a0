"""Named values of steps: means, the first step that is not finite, and the error that names its images."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from patchgen.model.device import SingleDevice
from patchgen.runs.folder import RunFolder
from patchgen.train.lifecycle import NEVER, StepValues, Trainer

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


def test_the_error_names_the_place_and_some_images(tmp_path: Path) -> None:
    trainer = Trainer(RunFolder(tmp_path), SingleDevice("cpu"), quiet=True)
    trainer.model, trainer.config = nn.Linear(2, 2), SimpleNamespace(lr=0.1)
    images = [f"{i}.png" for i in range(6)]
    trainer.require_finite({"main": 1.0}, 9, lambda step: images)
    trainer.values.add({"main": torch.tensor(NAN)}, 3)
    with pytest.raises(ValueError, match="diverged at stage 1, epoch 2, step 3: main is .*now 0.1") as caught:
        trainer.require_finite({"main": NAN, "L_ms": 1.0}, 9, lambda step: images, stage=1, epoch=2)
    assert "0.png, 1.png, 2.png, 3.png, ... (all" in str(caught.value) and str(tmp_path) in str(caught.value)
    written = json.loads((tmp_path / "diverged.json").read_text())
    assert written == {"stage": 1, "epoch": 2, "step": 3, "values": ["main"], "images": images}
    trainer.model.requires_grad_(False).bias.data[0] = NAN
    trainer.require_finite({}, 9, lambda step: images)  # a weight that is not trained

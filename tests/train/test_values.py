"""Named values of steps: means, the first step that is not finite, and the error that names its images."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from patchgen.model.device import SingleDevice
from patchgen.runs.folder import RunFolder
from patchgen.train.lifecycle import Trainer

NAN = float("nan")
IMAGES = [f"{i}.png" for i in range(6)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(RunFolder(tmp_path), SingleDevice("cpu"), quiet=True)
    trainer.model, trainer.config = nn.Linear(2, 2), SimpleNamespace(lr=0.1)
    return trainer


def test_means_count_each_name_by_itself(trainer: Trainer) -> None:
    trainer.values = [(0, {"main": torch.tensor(1.0), "rare": torch.tensor(5.0)}), (1, {"main": torch.tensor(2.0)})]
    assert trainer.means(1, lambda step: IMAGES) == {"main": 1.5, "rare": 5.0}
    assert trainer.means(1, lambda step: IMAGES) == {}  # nothing since then


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_the_error_names_the_first_bad_step_and_some_images(bad: float, trainer: Trainer, tmp_path: Path) -> None:
    values = [1.0, bad, 1.0, NAN]
    trainer.values = [(i, {"main": torch.tensor(v), "L_ms": torch.tensor(0.0)}) for i, v in enumerate(values)]
    with pytest.raises(ValueError, match="diverged at stage 1, epoch 2, step 1: main is .*now 0.1") as caught:
        trainer.means(9, lambda step: IMAGES, stage=1, epoch=2)
    assert "0.png, 1.png, 2.png, 3.png, ... (all" in str(caught.value) and str(tmp_path) in str(caught.value)
    written = json.loads((tmp_path / "diverged.json").read_text())
    assert written == {"stage": 1, "epoch": 2, "step": 1, "values": ["main"], "images": IMAGES}


def test_a_weight_counts_if_it_is_trained(trainer: Trainer) -> None:
    trainer.model.requires_grad_(False).bias.data[0] = NAN
    assert trainer.means(9, lambda step: IMAGES) == {}
    trainer.model.requires_grad_(True)
    with pytest.raises(ValueError, match="diverged at step 9: weights"):
        trainer.means(9, lambda step: IMAGES)

"""--class-weights balanced: every class has the same share of the main loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.model.classifier import Output
from patchgen.tasks import make_fold
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train


@pytest.fixture(scope="module")
def uneven(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In `clinic` a class has three images instead of ten; `field` has none of another."""
    root = tmp_path_factory.mktemp("uneven") / "photos"
    shutil.copytree(image_folder, root)
    for file in sorted((root / "clinic" / "circle").iterdir())[3:]:
        file.unlink()
    shutil.rmtree(root / "field" / "cross")
    return root


def test_weights_are_those_of_a_count_over_balanced_batches(uneven: Path) -> None:
    fold = make_fold(Config(data=str(uneven), unseen="studio"))
    weights = fold.balanced_weights()
    drawn = []  # the class of images drawn as batches are: as many of each domain
    for rows in fold.train.values():
        counts = np.bincount(fold.target[rows], minlength=3)
        drawn.append(counts / counts.sum())
    share = np.mean(drawn, 0)
    assert weights * share == pytest.approx(np.full(3, 1 / 3))  # equal shares, and a mean weight of 1
    assert weights.argmax() == int(share.argmin()) and weights.max() > 1.2


def test_the_main_loss_is_torchs_weighted_one() -> None:
    method = make_method(Config(data="x", unseen="a", method="lp-ln", class_weights="balanced"))
    weight = torch.tensor([0.5, 1.0, 3.0])
    method.register_buffer("class_weights", weight, persistent=False)
    logits, label = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, -1, 0])
    batch = Batch(image=torch.zeros(6, 1), label=label, domain=torch.zeros(6, dtype=torch.long), index=torch.arange(6))
    sums = nn.functional.cross_entropy(logits, label, weight=weight, ignore_index=-1, reduction="sum")
    assert method.losses(Output(logits, logits), batch)["main"] == pytest.approx(float(sums) / 5)
    images = torch.rand(9)  # by row of the table
    method.use_sample_weights(images.numpy())
    each = nn.functional.cross_entropy(logits, label, weight=weight, ignore_index=-1, reduction="none")
    assert method.losses(Output(logits, logits), batch)["main"] == pytest.approx(float((images[:6] * each).sum()) / 5)


def test_a_run_uses_them(uneven: Path, tiny_settings: dict[str, Any], tmp_path: Path,
                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    config = Config(**{**tiny_settings, "data": str(uneven), "method": "patchgen-select", "image_size": 28,
                       "swad": False, "class_weights": "balanced", "steps": 3})  # fmt: skip
    seen = []
    whole = FoldTrainer.take_step

    def look(self: FoldTrainer, step: int) -> None:
        seen.append(self.method.class_weights)
        whole(self, step)

    monkeypatch.setattr(FoldTrainer, "take_step", look)
    run = train(config, tmp_path, quiet=True)
    assert run.done and run.config.class_weights == "balanced"
    assert seen[0] is not None and seen[0].numpy() == pytest.approx(make_fold(config).balanced_weights())

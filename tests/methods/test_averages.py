"""SMA and GESTUR: averages of the weights against loops, and averages that runs choose and save."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.methods.averages import NamedBuffers
from patchgen.model.classifier import trained_tensors
from patchgen.runs.tensors import load_tensors
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["sma", "patchgen+sma"])
def test_the_mean_begins_at_its_share_of_the_steps(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, steps=20, hparams={"sma_start": 0.15})  # from update 3 on, with the weights that it finds
    seen = [copies(trained_tensors(s.model))]
    for step in range(8):
        if step < 3:
            assert all(torch.equal(t, seen[-1][n]) for n, t in s.method.predicting(s.model).items())
        s.move()
        s.method.after_step(s.model)
        seen.append(copies(trained_tensors(s.model)))
    average = s.method.predicting(s.model)
    assert average.keys() == trained_tensors(s.model).keys()
    for n, tensor in average.items():
        torch.testing.assert_close(tensor, torch.stack([weights[n] for weights in seen[2:]]).mean(0))


def test_the_mean_is_what_a_run_chooses_and_saves(tiny_run: Callable[..., Any]) -> None:
    plain, mean = tiny_run("lp-ln", select="last"), tiny_run("sma", select="last", hparams={"sma_start": 0.5})
    a, b = (run.records("evaluation") for run in (plain, mean))
    assert a[0]["validation"] == b[0]["validation"] and a[0]["train"] == b[0]["train"]
    assert a[-1]["train"] == b[-1]["train"]  # the mean does not train
    assert a[-1]["validation"] != b[-1]["validation"]
    ours, theirs = (load_tensors(run.checkpoint("selected"))[0] for run in (mean, plain))
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_names_with_dots_come_back() -> None:
    kept = NamedBuffers({"a.b_c": torch.ones(2), "a_b.c": torch.zeros(1)}, saved=True)
    assert list(kept.named()) == ["a.b_c", "a_b.c"] and not list(kept.parameters())
    assert len(kept.state_dict()) == 2 and not NamedBuffers({"a.b": torch.ones(1)}, saved=False).state_dict()


def test_the_average_follows_by_its_decay(scene: Callable[..., Any]) -> None:
    s = scene("patchgen+gestur", tune="full", hparams={"decay": 0.9})
    for _ in range(2):
        average = copies(s.method.predicting(s.model))
        s.move()
        s.method.after_step(s.model)
        for n, tensor in s.method.predicting(s.model).items():
            torch.testing.assert_close(tensor, 0.9 * average[n] + 0.1 * trained_tensors(s.model)[n].detach())


def test_the_average_starts_where_the_first_step_does(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(self: FoldTrainer) -> None:  # the mask is calibrated by now
        found, trained = self.predicting(), trained_tensors(self.model)
        assert found.keys() == trained.keys() and all(torch.equal(found[name], trained[name]) for name in trained)
        raise KeyboardInterrupt

    monkeypatch.setattr("patchgen.train.fold.fit", look)
    with pytest.raises(KeyboardInterrupt):
        train(Config(**{**tiny_settings, "method": "patchgen+gestur"}), tmp_path, quiet=True)

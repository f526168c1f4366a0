"""SMA: the mean against a list of all weights, and a mean that survives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.model.classifier import trained_tensors
from patchgen.runs.tensors import load_tensors


def walk(s: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    """Weights after each of several steps that the method followed."""
    seen = []
    for number in range(steps):
        with torch.no_grad():
            for tensor in trained_tensors(s.model).values():
                tensor += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        s.method.after_step(s.model)
        seen.append({name: tensor.detach().clone() for name, tensor in trained_tensors(s.model).items()})
    return seen


@pytest.mark.parametrize("name", ["sma", "patchgen+sma"])
def test_the_mean_begins_at_its_share_of_the_steps(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name, steps=20, hparams={"sma_start": 0.15})  # from update 3 on, with the weights that it finds
    start = {n: t.detach().clone() for n, t in trained_tensors(s.model).items()}
    assert all(torch.equal(t, start[n]) for n, t in s.method.predicting(s.model).items())
    seen = walk(s, 2)
    assert all(torch.equal(t, seen[-1][n]) for n, t in s.method.predicting(s.model).items())
    s = scene(name, steps=20, hparams={"sma_start": 0.15})
    seen = walk(s, 8)
    found = s.method.predicting(s.model)
    assert found.keys() == trained_tensors(s.model).keys()
    for n, tensor in found.items():
        torch.testing.assert_close(tensor, torch.stack([weights[n] for weights in seen[1:]]).mean(0))


def test_the_default_begins_with_update_100_of_5001(scene: Callable[..., Any]) -> None:
    s = scene("lp+sma")
    assert s.method.config.steps == 5001
    seen = walk(s, 103)
    for n, tensor in s.method.predicting(s.model).items():
        torch.testing.assert_close(tensor, torch.stack([weights[n] for weights in seen[98:]]).mean(0))


def test_it_has_no_parameters_and_no_terms_of_its_own(scene: Callable[..., Any]) -> None:
    s = scene("sma")
    assert not list(s.method.parameters()) and list(s.method.losses(s.forward(), s.batch)) == ["main"]
    assert len(s.method.state_dict()) == len(trained_tensors(s.model)) + 1


def test_the_mean_is_what_a_run_chooses_and_saves(tiny_run: Callable[..., Any]) -> None:
    plain, mean = tiny_run("lp-ln", select="last"), tiny_run("sma", select="last", hparams={"sma_start": 0.5})
    a, b = (run.records("evaluation") for run in (plain, mean))
    assert a[0]["validation"] == b[0]["validation"] and a[0]["train"] == b[0]["train"]
    assert a[-1]["train"] == b[-1]["train"]  # the mean does not train
    assert a[-1]["validation"] != b[-1]["validation"]
    ours, theirs = (load_tensors(run.checkpoint("selected"))[0] for run in (mean, plain))
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)

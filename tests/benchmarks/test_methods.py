"""Costs of the methods: the table they are kept in, and what is counted rather than timed."""

from pathlib import Path

import pytest
import torch

from benchmarks.common import trained_step
from benchmarks.methods import measure
from patchgen.commands.methods import step_costs
from patchgen.diagnose.cost import random_batch
from patchgen.methods import METHODS


def test_the_kept_costs_are_of_methods_that_exist() -> None:
    costs = step_costs()
    assert set(costs) <= set(METHODS) and costs["lp-ln"] == pytest.approx(1, abs=0.1)
    assert costs["lp"] < 1 < costs["full"]


def test_parameters_are_counted_and_ratios_are_of_pairs(tmp_path: Path) -> None:
    file = tmp_path / "cost.csv"
    found = measure(("lp", "miro"), source="tiny", image_size=28, per_domain=2, repeats=2, csv=str(file))
    lp, miro = (found["methods"][name] for name in ("lp", "miro"))
    assert lp["trained_parameters"] == 64 * 7 + 7 and lp["own_parameters"] == 0 < miro["own_parameters"]
    assert miro["lowest"] <= miro["ratio"] <= miro["highest"]
    assert file.read_text() == f"method,ratio\nlp,{lp['ratio']:.2f}\nmiro,{miro['ratio']:.2f}\n"


def test_a_step_is_the_methods_own_step() -> None:
    step = trained_step("gestur", "tiny", 28, lr=0.1)
    before = {name: tensor.clone() for name, tensor in step.method.predicting(step.model).items()}  # type: ignore[union-attr]
    step(random_batch(6, 28))
    after = step.method.predicting(step.model)
    assert after is not None and any(not torch.equal(before[name], after[name]) for name in before)

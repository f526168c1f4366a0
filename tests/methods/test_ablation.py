"""Rows 2.1 to 2.4 as methods: the right terms and one start for all; the choices of `ablation-select`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchgen.model.losses import cross_entropy, mask_suppression

ROWS = ("ablation-static", "ablation-channel", "ablation-attention", "ablation-attention-ms")


@pytest.mark.parametrize("name", ROWS)
def test_terms(name: str, scene: Callable[..., Any]) -> None:
    here = scene(name, lambda_ms=0.5, tau=0.6)
    with torch.no_grad():
        out = here.forward()
        found = here.method.losses(out, here.batch)
    assert list(found) == (["main", "L_ms"] if name == "ablation-attention-ms" else ["main"])
    assert torch.equal(found["main"], cross_entropy(out.logits, here.batch.label))
    if "L_ms" in found:
        weak = out.mask[out.mask < 0.6]
        assert float(found["L_ms"]) == pytest.approx(0.5 * float(weak.mean()), rel=1e-5)
        assert float(found["L_ms"]) == pytest.approx(0.5 * float(mask_suppression(out.mask, 0.6)))


def test_rows_of_a_seed_begin_with_the_same_head_gate_and_refinement(scene: Callable[..., Any]) -> None:
    states = [scene(name, seed=4).model.state_dict() for name in ("patchgen", *ROWS)]
    for name in ("head.weight", "select.gate.0.weight", "select.refine.1.weight"):
        assert all(torch.equal(states[0][name], other[name]) for other in states)


CHOICES = [
    {"gain": 3}, {"spread": 0.5}, {"learn_gain": 1}, {"contrast": 0}, {"ms": 1}, {"conf": 1}, {"sim": 1},
    {"on_features": 1}, {"anneal": 0.5}, {"hard_from": 0.5}, {"drop": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_each_choice_of_the_selection_changes_the_training(choice: dict[str, float], tiny_run: Any) -> None:
    plain, other = tiny_run("patchgen-select", swad=False), tiny_run("ablation-select", hparams=choice, swad=False)
    losses = [run.records("evaluation")[-1]["train"] for run in (plain, other)]
    assert other.done and losses[0] != losses[1]


def test_its_defaults_are_patchgen_select(tiny_run: Any) -> None:
    plain, same = (tiny_run(name, swad=False) for name in ("patchgen-select", "ablation-select"))
    assert plain.checkpoint("selected").stat().st_size > 0
    assert plain.records("evaluation")[-1]["train"] == same.records("evaluation")[-1]["train"]


def test_a_block_that_is_not_there_is_refused(tiny_run: Any) -> None:
    with pytest.raises(ValueError, match="block must be below the number of blocks, 2, not 5"):
        tiny_run("ablation-select", hparams={"block": 5})

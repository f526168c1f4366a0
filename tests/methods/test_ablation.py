"""Rows 2.1 to 2.4 as methods: the right selector, the right terms, one start for all, and runs that can be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.methods import METHODS
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


@pytest.mark.parametrize("name", ROWS)
def test_gradients_reach_the_selector_the_head_and_the_tuned_backbone(name: str, scene: Callable[..., Any]) -> None:
    here = scene(name)
    reached, _ = here.reached(here.method.losses(here.forward(), here.batch)["main"])
    parts = {tensor.split(".")[0] for tensor in reached}
    assert parts == {"backbone", "select", "head"}
    own = {n for n, p in here.model.select.named_parameters() if p.requires_grad}
    assert {f"select.{n}" for n in own} <= reached


def test_rows_of_a_seed_begin_with_the_same_head_gate_and_refinement(scene: Callable[..., Any]) -> None:
    states = [scene(name, seed=4).model.state_dict() for name in ("patchgen", *ROWS)]
    for name in ("head.weight", "select.gate.0.weight", "select.refine.1.weight"):
        assert all(torch.equal(states[0][name], other[name]) for other in states)


@pytest.mark.parametrize("name", ROWS)
def test_a_run_predicts_what_it_recorded(name: str, tiny_run: Callable[..., Any], image_folder: Path) -> None:
    from patchgen.predict.predictor import Prediction, load_run

    run = tiny_run(name, steps=3)
    model = load_run(run.path)
    assert type(model.model.select) is METHODS[name].selector  # type: ignore[attr-defined]
    paths = sorted((image_folder / "studio").rglob("*.png"))
    found = [one.label for one in model.predict(paths) if isinstance(one, Prediction)]
    right = [label == path.parent.name for label, path in zip(found, paths, strict=True)]
    test = next(record for record in run.records("test") if record["checkpoint"] == "selected")
    assert sum(right) / len(right) == pytest.approx(test["all"]["accuracy"])
    assert model.explain(paths[0]).mask.shape == (4, 4)


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

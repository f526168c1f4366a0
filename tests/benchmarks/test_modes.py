"""Modes of a step: what runs in which number format and compiled, and what the table says of it; no times."""

from __future__ import annotations

import torch

from benchmarks import modes, table
from patchgen.diagnose.cost import random_batch


def test_modes_step_in_their_number_format_from_the_same_weights() -> None:
    data = random_batch(2, 28)
    runners = modes._runners("tiny", data, "aot_eager")
    kinds, moved = {}, {}
    for name, runner in runners.items():
        block = runner.rival.model.backbone.model.get_submodule("encoder.layer")[0]
        with runner.fabric.autocast(), torch.no_grad():
            kinds[name] = block.mlp(torch.zeros(1, 1, 64)).dtype
        assert (block._compiled_call_impl is not None) == modes.MODES[name].compiled
        runner.step(data)
        moved[name] = runner.rival.model.backbone.state_dict()
    assert all((kind == torch.bfloat16) == ("bf16" in name) for name, kind in kinds.items())
    for name, state in moved.items():
        other = moved["float32"] if modes.MODES[name].precision == "32-true" else moved["bf16-mixed"]
        torch.testing.assert_close(state, other, rtol=1e-3, atol=1e-5)


def test_a_failing_compiler_is_told_of() -> None:
    found = modes.measure("tiny", image_size=28, batch=2, repeats=1, backend="no such back end")
    assert found["modes"]["bf16-mixed"]["fell_back"] is None
    assert found["modes"]["compiled"]["fell_back"].endswith("continuing without it")
    rows = table.table({"modes": found})
    assert [row.value.endswith(", not compiled") for row in rows] == [False, False, True, True]

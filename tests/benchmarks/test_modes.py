"""Modes of a step: what runs in which number format and compiled, and what the table says of it; no times."""

from __future__ import annotations

import pytest
import torch

from benchmarks import modes, table
from patchgen.diagnose.cost import random_batch


def test_every_mode_is_compared_with_the_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = modes.measure(**modes.SMALL)["modes"]  # type: ignore[arg-type]
    assert list(found) == list(modes.MODES) and len(capsys.readouterr().err.splitlines()) == len(found)
    assert found["float32"]["faster"] == found["float32"]["lowest"] == found["float32"]["highest"] == 1
    for name, each in found.items():
        assert (each["compile_seconds"] is not None) == ("compiled" in name) and each["fell_back"] is None


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


def test_ratios_by_hand() -> None:
    runner = modes.Runner(None, None, 24.4, None)  # type: ignore[arg-type]
    found = modes._found(runner, [2.0, 4.0, 1.0], [1.0, 3.0, 2.0])
    assert (found["lowest"], found["faster"], found["highest"]) == (0.5, 0.75, 2.0)
    about = {"backbone": "vit", "image_size": 224, "device": "cpu", "modes": {"float32": found, "compiled": found}}
    [row] = table.table({"modes": about})
    assert row.what == "vit, 224 px, cpu: LP+LN step, compiled: times as fast as float32" and not row.verdict
    assert row.value == "0.75 (0.50-2.00), after 24 s of compiling"


@pytest.mark.parametrize("name", ["batch", "repeats"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        modes.measure("tiny", image_size=28, **{name: 0})

"""Switches of the step: gradients that are cut to a length, and operations that give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.train.fold import deterministic
from patchgen.train.lifecycle import train
from patchgen.train.loop import Step


def lengths(monkeypatch: pytest.MonkeyPatch, config: Config, out: Path) -> list[float]:
    """Norm of all gradients at each step, as the optimiser gets them."""
    found: list[float] = []
    whole = Step.apply

    def spy(self: Step) -> None:
        step = self.optimizer.step

        def look(*args: Any, **more: Any) -> Any:
            grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            found.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
            return step(*args, **more)

        self.optimizer.step = look
        try:
            whole(self)
        finally:
            self.optimizer.step = step

    with monkeypatch.context() as patch:
        patch.setattr(Step, "apply", spy)
        train(config, out, quiet=True)
    return found


def test_a_long_gradient_is_cut_and_a_short_one_is_left(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**tiny_settings, "steps": 2, "eval_every": 1, "swad": False}
    free = lengths(monkeypatch, Config(**settings), tmp_path)
    cut = lengths(monkeypatch, Config(**settings, clip_gradients=free[0] / 2), tmp_path)
    loose = lengths(monkeypatch, Config(**settings, clip_gradients=100 * max(free)), tmp_path)
    assert len(free) == 2 and cut[0] == pytest.approx(free[0] / 2, rel=1e-4)
    assert loose == pytest.approx(free, rel=1e-6)


def test_the_switch_lasts_as_long_as_the_training(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    whole = Step.apply
    monkeypatch.setattr(
        Step, "apply", lambda self: (seen.append(torch.are_deterministic_algorithms_enabled()), whole(self))[1]
    )
    settings = {**tiny_settings, "steps": 2, "swad": False}
    plain = train(Config(**settings), tmp_path / "plain", quiet=True)
    switched = train(Config(**settings, deterministic=True), tmp_path / "switched", quiet=True)
    assert seen == [False, False, True, True] and not torch.are_deterministic_algorithms_enabled()
    assert plain.path.name == switched.path.name
    losses = [[record["train"] for record in run.records("evaluation")] for run in (plain, switched)]
    assert losses[0] == losses[1]


def test_what_was_set_before_is_set_after() -> None:
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        with deterministic(True):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)

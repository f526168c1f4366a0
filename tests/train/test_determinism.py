"""`--deterministic`: on as long as the training, with the same name and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.train.fold import deterministic
from patchgen.train.lifecycle import train
from patchgen.train.loop import Step


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

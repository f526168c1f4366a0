"""TensorBoard: the numbers of the records, once each, also after a resume; nothing else of the run changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.train import track
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train
from patchgen.train.track import Tracker, scalars

pytest.importorskip("tensorboard", reason="the extra `track` is not installed")


def events(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_scalars_are_the_named_numbers() -> None:
    record = {"kind": "evaluation", "step": 3, "train": {"main": 0.5}, "seconds": 2.0, "mask": {"mean": 1},
              "validation": {"art": {"accuracy": 0.25, "confusion": [1, 2]}}}  # fmt: skip
    assert dict(scalars(record)) == {"train/main": 0.5, "mask/mean": 1.0, "validation/art/accuracy": 0.25}


def test_a_resumed_run_is_one_line_and_has_the_same_name(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(**{**tiny_settings, "method": "lp", "image_size": 28, "swad": False})
    whole, seen = FoldTrainer._step, list[int]()

    def breaks(self: FoldTrainer, step: int) -> None:
        seen.append(step)
        if seen == [0, 1, 2, 3]:
            raise KeyboardInterrupt
        whole(self, step)

    monkeypatch.setattr(FoldTrainer, "_step", breaks)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "runs", quiet=True, track=True)
    run = train(config, tmp_path / "runs", quiet=True, track=True)
    recorded = run.records("evaluation")
    assert [step for step, _ in events(run)["train/main"]] == [record["step"] for record in recorded] == [0, 2, 4]
    values = [value for _, value in events(run)["validation/field/accuracy"]]
    assert values == pytest.approx([record["validation"]["field"]["accuracy"] for record in recorded])
    untracked = train(config, tmp_path / "plain", quiet=True)
    assert untracked.path.name == run.path.name and not (untracked.path / "tensorboard").exists()


def test_epochs_are_counted_through_the_stages(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.listeners.append(Tracker())
    for stage, epoch, loss in ((0, 0, 1.0), (0, 1, 0.5), (1, 0, 0.25)):
        run.append({"kind": "epoch", "stage": stage, "epoch": epoch, "lr": 0.5, "train": {"main": loss}})
    assert events(run)["train/main"] == [(0, 1.0), (1, 0.5), (2, 0.25)]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "patchgen\[track\]"'):
        Tracker()

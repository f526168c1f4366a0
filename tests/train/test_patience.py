"""--patience: a run stops where source validation no longer improves, and a killed one stops at the same step."""

from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.train import fold
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train
from tests.conftest import interrupt

VALIDATION = [0.2, 0.5, 0.5, 0.4, 0.9, 0.9]  # at steps 0, 2, 4, ...: no gain at 4 and 6


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose validation accuracy is planned."""
    evaluate = FoldTrainer._keep

    def keep(self: FoldTrainer, step: int, record: dict[str, Any]) -> None:
        for domain in record["validation"].values():
            domain["accuracy"] = VALIDATION[step // 2]
        evaluate(self, step, record)

    monkeypatch.setattr(FoldTrainer, "_keep", keep)


def run_with(settings: dict[str, Any], out: Path, **more: Any) -> RunFolder:
    usual = {"method": "lp", "image_size": 28, "steps": 11, "augment": False, "swad": False}
    return train(Config(**{**settings, **usual, **more}), out, quiet=True)


def steps_of(run: RunFolder) -> list[int]:
    return [record["step"] for record in run.records("evaluation")]


@pytest.mark.usefixtures("planned")
def test_it_stops_after_evaluations_without_gain(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    run = run_with(tiny_settings, tmp_path, patience=2, swad=True)
    assert steps_of(run) == [0, 2, 4, 6]  # 4 ties and 6 is worse: the best, 0.9 at 8, is never seen
    assert run.records("test")[0]["step"] == 4  # ties keep the most recent
    assert run.records("test")[1]["end_step"] <= 6  # the average is over the steps that were made
    assert "stopped early after step 6: --patience 2" in (run.path / "summary.md").read_text()
    assert steps_of(run_with(tiny_settings, tmp_path, patience=3)) == [0, 2, 4, 6, 8, 10]


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("place", "name", "count"), [(FoldTrainer, "take_step", 6), (fold, "close_run", 1)])
def test_a_killed_run_stops_at_the_same_step(
    place: Any, name: str, count: int, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    """In step 5, between two evaluations without gain, and where the run has stopped and is about to be scored."""
    interrupt(place, name, count, lambda: run_with(tiny_settings, tmp_path / "killed", patience=2))
    run = run_with(tiny_settings, tmp_path / "killed", patience=2)
    assert steps_of(run) == [0, 2, 4, 6]
    assert run.records("test") == run_with(tiny_settings, tmp_path / "whole", patience=2).records("test")

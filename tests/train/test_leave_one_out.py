"""`--select leave-one-out`: the step and the settings are chosen by trainings without each source."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.config import Config
from patchgen.report.table import best_runs
from patchgen.runs.scores import read_runs
from patchgen.train.lifecycle import train


@pytest.fixture
def config(tiny_settings: dict[str, Any]) -> Config:
    more = {"method": "lp", "augment": False, "swad": False, "steps": 9, "select": "leave-one-out", "val_images": None}
    return Config(**{**tiny_settings, **more})


def without_studio(config: Config, folder: Path) -> list[float]:
    """By hand: two sites alone, each the unseen one in turn; mean accuracy of their held-out parts, by evaluation."""
    for site in ("clinic", "field"):
        shutil.copytree(Path(config.data) / site, folder / "two" / site, dirs_exist_ok=True)
    each = []
    for site in ("clinic", "field"):
        alone = replace(config, data=str(folder / "two"), unseen=site, select="oracle")
        records = train(alone, folder / "alone", quiet=True).records("evaluation")
        each.append([record["oracle"]["accuracy"] for record in records])
    return np.mean(each, 0).tolist()


def test_the_choice_is_that_by_hand(config: Config, tmp_path: Path) -> None:
    scores = {}
    for rate in (0.003, 0.3):
        one = replace(config, lr=rate)
        run = train(one, tmp_path / "runs", quiet=True)
        scores[rate] = by_hand = without_studio(one, tmp_path)
        records = run.records("evaluation")
        assert [float(np.mean(list(r["leave_one_out"].values()))) for r in records] == by_hand
        best = max(range(len(by_hand)), key=lambda i: (by_hand[i], i))  # ties: the most recent
        assert run.records("test")[0]["step"] == records[best]["step"]
    recorded, skipped = read_runs([tmp_path / "runs"])
    assert recorded["path"].nunique() == 2 and not skipped  # the trainings without a source are in no table
    chosen = best_runs(recorded)["accuracy", "selected", "all", "photos", "studio"][config.seed]
    assert max(scores[0.003]) != max(scores[0.3])
    assert chosen.lr == max(scores, key=lambda rate: max(scores[rate])) and chosen.tried == 2


def test_a_killed_run_repeats_no_training(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(config, tmp_path / "a", quiet=True)
    inner = sorted((whole.path / ".leave-one-out").iterdir())
    assert len(inner) == 2 and all((path / "done").exists() for path in inner)
    shutil.copytree(inner[0], tmp_path / "b" / whole.path.name / ".leave-one-out" / inner[0].name)
    again = train(config, tmp_path / "b", quiet=True)
    times = [(again.path / ".leave-one-out" / path.name / "done").stat().st_mtime for path in inner]
    assert times[0] == pytest.approx((inner[0] / "done").stat().st_mtime) and times[1] > times[0]
    ours, theirs = ([r["leave_one_out"] for r in run.records("evaluation")] for run in (whole, again))
    assert ours == theirs


def test_it_needs_two_sources(config: Config, tmp_path: Path) -> None:
    shutil.copytree(Path(config.data) / "clinic", tmp_path / "two" / "clinic")
    shutil.copytree(Path(config.data) / "studio", tmp_path / "two" / "studio")
    with pytest.raises(ValueError, match="leaves each source domain out in turn, and the data has only one"):
        train(replace(config, data=str(tmp_path / "two")), tmp_path)
    with pytest.raises(ValueError, match="leave-one-out is for task mdg"):
        replace(config, task="mdg_gcd")

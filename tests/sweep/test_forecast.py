"""The forecast by hand: from finished runs of the same method, of others, or a rate, and it says which."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.runs.folder import RunFolder, run_name
from patchgen.sweep.jobs import Job
from patchgen.sweep.plan import FINISHED, RATE, predict_cost, seconds_of

CONFIG = Config("d", "u", steps=10, batch_per_domain=5, image_size=112, backbone="dinov2-small", method="lp")
USUAL = 10 * 5 * 3 / RATE  # seconds of its run at the default rate


def job(out: Path, **changes: Any) -> Job:
    config = replace(CONFIG, **changes)
    return Job(("a job",), ("",), config, out, run_name(config, "rows"), size=config.steps)


def finish(made: Job, seconds: list[float]) -> RunFolder:
    run = RunFolder.create(made.out, made.config, made.run)
    run.write_json("env.json", {})
    for step, value in enumerate(seconds):
        run.append({"kind": "evaluation", "step": step, "seconds": value})
    run.finish("")
    return run


@pytest.mark.parametrize(("changes", "share"), [
    ({}, 1), ({"image_size": 224}, 4), ({"backbone": "/x/vit_tiny_patch16_224.safetensors"}, 0.25),
    ({"backbone": "auto"}, 1),
])  # fmt: skip
def test_without_finished_runs_a_stated_rate_is_scaled(changes: dict[str, Any], share: float, tmp_path: Path) -> None:
    forecast = predict_cost([job(tmp_path, **changes)], tmp_path)
    assert forecast.seconds == pytest.approx(share * USUAL)
    [basis] = forecast.bases
    assert "stated rate" in basis and "two CPU cores" in basis


def test_the_users_rate_is_used(tmp_path: Path) -> None:
    forecast = predict_cost([job(tmp_path)], tmp_path, rate=30.0)
    assert forecast.seconds == pytest.approx(5.0) and list(forecast.bases) == ["the rate given, 30 images a second"]


def test_finished_runs_of_the_same_method_take_precedence(tmp_path: Path) -> None:
    finish(job(tmp_path, seed=7), [1.0, 2.0])
    finish(job(tmp_path, seed=8), [5.0])
    finish(job(tmp_path, method="patchgen"), [16.0])
    todo = [job(tmp_path, seed=1), job(tmp_path, method="full"), job(tmp_path, steps=20), job(tmp_path, seed=7)]
    forecast = predict_cost(todo, tmp_path)
    assert forecast.seconds == pytest.approx((3 + 5) / 2 + (3 + 5 + 16) / 3 + 2 * USUAL, abs=0.1)
    assert forecast.bases[FINISHED] == 2 and forecast.bases.total() == 3  # one is done
    text = forecast.lines(workers=2)
    assert text[0].startswith("forecast: 32 s of work, about 16 s with 2 workers")
    assert f"  2 runs from {FINISHED}" in text


def test_damaged_runs_are_ignored_and_interrupted_ones_count_in_part(tmp_path: Path) -> None:
    damaged = finish(job(tmp_path, seed=7), [1.0])
    (damaged.path / "records.jsonl").write_text("not JSON\n")
    stopped, other = job(tmp_path), job(tmp_path, seed=8)
    RunFolder.create(tmp_path, stopped.config, stopped.run).append({"kind": "evaluation", "step": 3, "seconds": 9.0})
    forecast = predict_cost([stopped], tmp_path)
    assert FINISHED not in forecast.bases and forecast.seconds == pytest.approx(0.6 * USUAL)
    (RunFolder.create(tmp_path, other.config, other.run).path / "records.jsonl").write_text("not JSON\n")
    assert other.progress == 0


def test_the_time_of_a_run_includes_validation(tmp_path: Path) -> None:
    run = finish(job(tmp_path), [1.0, 2.0])
    assert seconds_of(run) == pytest.approx(3.0, abs=0.1)  # written at once, as in a copy
    os.utime(run.path / "env.json", (100.0, 100.0))
    os.utime(run.path / "done", (150.0, 150.0))
    assert seconds_of(run) == 50.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89, "89 s"), (90, "1.5 min"), (7200, "2.0 h"), (2e5, "2.3 days")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text

"""The forecast by hand: from finished runs of the same method, of others, or a rate, and it says which."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.runs.folder import RunFolder, run_name
from patchgen.sweep.forecast import ALIKE, RATE, SAME, finished_runs, predict_cost, seconds_of, usual_rate
from patchgen.sweep.jobs import Job

CONFIG = Config("d", "u", steps=10, batch_per_domain=5, image_size=112, backbone="dinov2-small", method="lp")


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


def test_without_any_run_the_stated_rate_is_used_and_named(tmp_path: Path) -> None:
    found = predict_cost([job(tmp_path)], [])
    assert found.seconds == pytest.approx(10 * 5 * 3 / RATE)
    [basis] = found.bases
    assert "stated rate" in basis and "two CPU cores" in basis
    given = predict_cost([job(tmp_path)], [], rate=30.0)
    assert given.seconds == pytest.approx(5.0) and list(given.bases) == ["the rate given, 30 images a second"]


def test_the_rate_falls_with_pixels_and_width() -> None:
    assert usual_rate(replace(CONFIG, image_size=224)) == RATE / 4
    assert usual_rate(replace(CONFIG, backbone="/x/vit_tiny_patch16_224.safetensors")) == 4 * RATE
    assert usual_rate(replace(CONFIG, backbone="auto")) == RATE


def test_finished_runs_of_the_same_method_come_first_then_those_of_others(tmp_path: Path) -> None:
    finish(job(tmp_path, seed=7), [1.0, 2.0])
    finish(job(tmp_path, seed=8), [5.0])
    finish(job(tmp_path, method="patchgen"), [16.0])
    todo = [job(tmp_path, seed=1), job(tmp_path, method="full"), job(tmp_path, steps=20), job(tmp_path, seed=7)]
    found = predict_cost(todo, finished_runs(tmp_path))
    assert found.seconds == pytest.approx((3 + 5) / 2 + (3 + 5 + 16) / 3 + 20 * 5 * 3 / RATE, abs=0.1)
    assert [found.bases[basis] for basis in (SAME, ALIKE)] == [1, 1] and found.bases.total() == 3  # the last is done
    text = found.lines(workers=2)
    assert text[0].startswith("forecast: 32 s of work, about 16 s with 2 workers") and f"  1 run from {SAME}" in text


def test_a_damaged_run_tells_nothing(tmp_path: Path) -> None:
    run = finish(job(tmp_path, seed=7), [1.0])
    (run.path / "records.jsonl").write_text("not JSON\n")
    assert SAME not in predict_cost([job(tmp_path)], finished_runs(tmp_path)).bases
    stopped = job(tmp_path, seed=8)
    begun = RunFolder.create(tmp_path, stopped.config, stopped.run)
    (begun.path / "records.jsonl").write_text("not JSON\n")
    assert stopped.progress == 0


def test_of_a_stopped_run_only_the_rest_counts(tmp_path: Path) -> None:
    stopped = job(tmp_path)
    RunFolder.create(tmp_path, stopped.config, stopped.run).append({"kind": "evaluation", "step": 3, "seconds": 9.0})
    assert predict_cost([stopped], []).seconds == pytest.approx(0.6 * 10 * 5 * 3 / RATE)


def test_a_runs_time_has_its_validation_too_where_the_files_tell(tmp_path: Path) -> None:
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

"""Time left is said when the rate is steady, and what several trainings share is said once."""

import subprocess
import sys

import pytest

from patchgen.common.progress import SILENCE, Progress, is_first, print_once


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("patchgen.common.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("patchgen.common.progress.SILENCE", 1e9)
    return clock


def work(bar: Progress, now: list[float], seconds: list[float]) -> None:
    for one in seconds:
        now[0] += one
        bar.advance()


def test_a_single_slow_step_predicts_nothing(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("training", 61) as bar:
        work(bar, now, [22.0])
        bar.say("step 0")
        now[0] += 30  # the first evaluation
        work(bar, now, [2.0] * 10)
        bar.say("step 10")
        work(bar, now, [2.0] * 50)
        bar.say("step 60")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "training [1/61] step 0",
        "training [11/61, 1.7 min left] step 10",
        "training [61/61] step 60",
    ]


def test_the_logger_silences_progress() -> None:
    code = """
import logging, sys
if sys.argv[1:]: logging.getLogger("patchgen").setLevel(sys.argv[1])
from patchgen.common.progress import Progress, logger
with Progress("training", 2) as bar: bar.say("a line 100 %")
logger.warning("a warning")
"""
    for level, lines in (
        ([], ["training [0/2] a line 100 %", "a warning"]),
        (["WARNING"], ["a warning"]),
        (["ERROR"], []),
    ):
        done = subprocess.run([sys.executable, "-c", code, *level], capture_output=True, text=True, check=True)
        assert (done.stderr.splitlines(), done.stdout) == (lines, "")


def test_a_line_at_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("calibrating", 40) as bar:
        for _ in range(40):
            bar.tick()
    assert len(capsys.readouterr().err.splitlines()) == 10


def test_a_file_gets_a_line_every_thirty_seconds(
    now: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SILENCE == 30
    monkeypatch.setattr("patchgen.common.progress.SILENCE", SILENCE)
    with Progress("training", 100) as bar:
        for _ in range(10):
            now[0] += 12
            bar.advance()
    assert [line.split()[1].split("/")[0] for line in capsys.readouterr().err.splitlines()] == ["[3", "[6", "[9"]


def test_news_are_said_once_within_a_fit() -> None:
    assert is_first("backbone: x") and is_first("backbone: x")
    with print_once():
        assert [is_first(text) for text in ("backbone: x", "backbone: x", "backbone: y")] == [True, False, True]
    with print_once():
        assert is_first("backbone: x")

"""The sweep bench: every no-op run is a finished run, and the command prints seconds a run."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--runs", "6", "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]["sweep"]
    assert (found["runs"], found["done"], found["done_here"], found["workers"]) == (6, 6, 6, 1)
    assert found["seconds_per_run"] == pytest.approx(found["seconds"] / 6)

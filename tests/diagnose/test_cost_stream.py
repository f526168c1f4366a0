"""The discovery bench at a tiny size: its parts add up, and the command prints its ratios."""

from __future__ import annotations

import json

import pytest

from patchgen.cli import main
from patchgen.diagnose.cost_stream import measure_discovery, pieces

SMALL = {
    "image_size": 28,
    "batch": 2,
    "repeats": 2,
    "labelled": 90,
    "unlabelled": 30,
    "dim": 16,
    "classes": 6,
    "inits": 2,
}


def test_parts_add_up() -> None:
    lines: list[str] = []
    found = measure_discovery("tiny", **SMALL, report=lines.append)  # type: ignore[arg-type]
    prompts, evaluation = found["prompts"], found["evaluation"]
    assert len(lines) == pieces(2) and all(len(seconds) == 2 for seconds in prompts["seconds"].values())
    for query, choice, step in zip(*prompts["seconds"].values(), strict=True):
        assert 0 < query + choice < step
    median = prompts["median_seconds"]
    assert prompts["share_of_step"] == median["choice"] / median["step"] < 1
    assert evaluation["labelled"] == 90 and evaluation["unlabelled"] == 30
    assert evaluation["ratio"] == evaluation["seconds"]["ours"] / evaluation["seconds"]["sklearn"]


def test_the_command_prints_its_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    words = [w for name, value in SMALL.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    command = ["bench", "discovery", "--backbone", "tiny", *words]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "choice of the prompts" in out and "time ratio" in out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"machine", "prompts", "evaluation"}
    assert main(["bench", "discovery", "--batch", "0"]) == 2
    assert "batch must be at least 1" in capsys.readouterr().err

"""The discovery bench at a tiny size: its parts add up, and the command prints its ratios."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.discovery import SMALL, measure


def test_parts_add_up() -> None:
    found = measure(**SMALL)  # type: ignore[arg-type]
    prompts, evaluation = found["prompts"], found["evaluation"]
    assert all(len(seconds) == 2 for seconds in prompts["seconds"].values())
    for query, choice, step in zip(*prompts["seconds"].values(), strict=True):
        assert 0 < query + choice < step
    median = prompts["median_seconds"]
    assert prompts["share_of_step"] == median["choice"] / median["step"] < 1
    assert evaluation["labelled"] == 90 and evaluation["unlabelled"] == 30
    assert evaluation["ratio"] == evaluation["seconds"]["ours"] / evaluation["seconds"]["sklearn"]


def test_the_command_prints_its_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    words = [w for name, value in SMALL.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["discovery", *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["found"]["discovery"].keys() == {"machine", "prompts", "evaluation"}
    ratio = printed["found"]["discovery"]["evaluation"]["ratio"]
    assert (printed["table"][-1]["what"], printed["table"][-1]["value"]) == ("ours / scikit-learn's", f"{ratio:.3f}")
    assert main(["discovery", "--batch", "0"]) == 2
    assert "batch must be at least 1" in capsys.readouterr().err

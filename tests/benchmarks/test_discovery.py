"""The discovery bench at a tiny size: its parts add up, and the command prints its ratios."""

from __future__ import annotations

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

"""The page on methods keeps its word: its example trains, its table has every method with its hyper-parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.methods import METHODS

GUIDE = (Path(__file__).parents[2] / "docs" / "study" / "methods.md").read_text(encoding="utf-8")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's file, run as it stands; forgotten after the test."""
    [source] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    monkeypatch.setitem(METHODS, "center", METHODS["lp-ln"])  # so that it is taken out again
    exec(compile(source, "docs/study/methods.md", "exec"), {"__name__": "example"})
    return source


def test_the_example_is_short(example: str) -> None:
    assert METHODS["center"].defaults == {"center": 0.01}
    assert len([line for line in example.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("name", ["center", "patchgen+center"])
def test_the_example_trains(name: str, example: str, tiny_run: Callable[..., Any]) -> None:
    first, last = tiny_run(name, steps=3).records("evaluation")
    assert 0 < last["train"]["L_center"] != first["train"]["L_center"]


def rows() -> dict[str, tuple[str, str, str]]:
    """name -> its mark, objective and hyper-parameters"""
    section = GUIDE.split("## Available methods")[1].split("##")[0]
    found = re.findall(r"^\| `([a-z-]+)`(⁺?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {name: (mark, objective, own) for name, mark, objective, own in found}


def test_the_table_has_every_host_method_with_its_defaults() -> None:
    table = rows()
    assert {name for name, method in METHODS.items() if method.addable} <= set(table) <= set(METHODS)
    for name, (mark, _, own) in table.items():
        assert bool(mark) == METHODS[name].addable, name
        stated = {word: float(value) for word, value in re.findall(r"`([a-z_]+)` ([\d.]+)", own)}
        assert stated == METHODS[name].all_defaults(), name

"""The page on methods and `patchgen methods`: an example that trains, tables with every method and what it needs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.cli import main
from patchgen.methods import METHODS
from patchgen.methods.clip import Sentences
from patchgen.methods.method import NEEDS

GUIDE = (Path(__file__).parents[2] / "docs" / "study" / "methods.md").read_text(encoding="utf-8")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's file, run as it stands; forgotten after the test."""
    [source] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    monkeypatch.setitem(METHODS, "center", METHODS["lp-ln"])  # so that it is taken out again
    exec(compile(source, "docs/study/methods.md", "exec"), {"__name__": "example"})
    return source


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


# On the command line


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["methods", *words, "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_needs_text_lists_the_clip_family(capsys: pytest.CaptureFixture[str]) -> None:
    found = [row["name"] for row in listed(capsys, "--needs", "text")]
    assert found == ["clip", "coop", "duprg", "promptstyler", "dpl", "clipood", "clipceil"]
    assert found == [name for name, method in METHODS.items() if issubclass(method, Sentences)]
    assert [row["name"] for row in listed(capsys, "--needs", "source-free")] == ["duprg", "promptstyler"]
    assert [row["name"] for row in listed(capsys, "--needs", "transductive")] == ["arm", "dpl"]


def test_every_method_names_its_source_and_known_needs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in listed(capsys)}
    assert rows.keys() == METHODS.keys() and all(row["summary"] for row in rows.values())
    assert all(set(row["needs"]) <= set(NEEDS) for row in rows.values())  # type: ignore[call-overload]
    for name in ("kadaptation", "clipceil", "bfmix-like"):
        assert "our reading" in str(rows[name]["summary"]) and rows[name]["reference"]
    for name in ("kadaptation", "clipood", "dpl"):
        assert rows[name]["cost"]

"""`patchgen methods`: what each method needs, costs and comes from."""

from __future__ import annotations

import json

import pytest

from patchgen.cli import main
from patchgen.methods import METHODS
from patchgen.methods.clip import Sentences
from patchgen.methods.method import NEEDS


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
    assert rows.keys() == METHODS.keys() and all(set(row["needs"]) <= set(NEEDS) for row in rows.values())  # type: ignore[call-overload]
    for name in ("kadaptation", "clipceil", "bfmix-like"):
        assert "our reading" in str(rows[name]["summary"]) and rows[name]["reference"]
    for name in ("kadaptation", "clipood", "dpl"):
        assert rows[name]["cost"]


def test_the_table_explains_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--needs", "source-free"]) == 0
    text = capsys.readouterr().out
    assert "needs text, source-free" in text and NEEDS["source-free"] in text and "lp-ln " not in text


def test_an_unknown_need_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--needs", "texts"]) != 0
    assert "--needs must be one of text, source-free, transductive, not 'texts'" in capsys.readouterr().err

"""Suggestions: case and signs between words do not count, and what is far from every name gets none."""

from pathlib import Path

import pytest

import patchgen
from patchgen.common.text import did_you_mean, json_text


@pytest.mark.parametrize(("word", "known", "hint"), [
    ("skecth", ("photo", "sketch"), "; did you mean 'sketch'?"),
    ("REAL WORLD", ("Art", "Real_World"), "; did you mean 'Real_World'?"),
    ("K19", ("K-16", "K-19"), "; did you mean 'K-19'?"),
    ("zzz", ("photo", "sketch"), ""),
    ("photo", (), ""),
])  # fmt: skip
def test_the_nearest_name_is_suggested(word: str, known: tuple[str, ...], hint: str) -> None:
    assert did_you_mean(word, known) == hint


def test_json_has_no_nan() -> None:
    found = json_text({"a": [float("nan"), 1.5, True], "b": (float("-inf"),), "c": {"d": None}}, None)
    assert found == '{"a": [null, 1.5, true], "b": [null], "c": {"d": null}}'
    assert json_text([1]) == "[\n  1\n]"


@pytest.mark.parametrize("package", ["commands", "diagnose", "report", "slides", "theory", "viewer"])
def test_results_are_written_by_it(package: str) -> None:
    files = Path(patchgen.__file__).parent.glob(f"{package}/*.py")
    assert not [file.name for file in files if "json.dump" in file.read_text(encoding="utf-8")]

"""Suggestions: case and signs between words do not count, and what is far from every name gets none."""

from __future__ import annotations

import pytest

from patchgen.common.text import did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("skecth", ("photo", "sketch"), "; did you mean 'sketch'?"),
        ("REAL WORLD", ("Art", "Real_World"), "; did you mean 'Real_World'?"),
        ("K19", ("K-16", "K-19"), "; did you mean 'K-19'?"),
        ("zzz", ("photo", "sketch"), ""),
        ("photo", (), ""),
    ],
)
def test_the_nearest_name_is_suggested(word: str, known: tuple[str, ...], hint: str) -> None:
    assert did_you_mean(word, known) == hint

"""The model card: names from data are never markup, and what means nothing is said."""

from __future__ import annotations

from typing import Any

import pytest

from patchgen.predict.card import SAME, card


@pytest.fixture
def facts() -> dict[str, Any]:
    calibration = {"images": 9, "accuracy": 1.0, "ece_before": 0.1, "ece_after": 0.05, "quantile": 0.99}
    counts = {"berlin | x": {"cat": 3, "<script>alert(1)</script>": 4}}
    return {
        "classes": ["cat", "<script>alert(1)</script>"], "image_size": 56, "has_mask": True, "temperature": 1.5,
        "unlike_threshold": 20.0, "expected": None, "folds": [], "calibration": calibration,
        "settings": {"method": "patchgen", "steps": 4},
        "data": {"sites": ["berlin | x"], "unseen": None, "trained_on": 7, "counts": counts, "groups": 0,
                 "split": "domainbed"},
        "backbone": {"resolved": "[tiny](http://x)", "note": "", "licence": "none", "included": True},
    }  # fmt: skip


def test_labels_are_text_and_never_markup(facts: dict[str, Any]) -> None:
    text = card(facts)
    assert "<script" not in text and "&#60;script&#62;alert(1)" in text
    assert "| berlin &#124; x | 3 | 4 |" in text and "](http" not in text
    assert facts["classes"][1].startswith("<script>"), "the facts stay as they are"


def test_models_of_identical_images_say_so(facts: dict[str, Any]) -> None:
    assert "look the same to this model" not in card(facts)
    assert "neither confidence nor the flag means anything" in card(facts | {"unlike_threshold": SAME / 10})

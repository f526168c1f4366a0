"""The model card: names from data are never markup, and what means nothing is said."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from patchgen.predict.card import SAME, card

MASKS = Path(__file__).parents[2] / "docs" / "use" / "reading-masks.md"


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
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["pipeline_tag"], header["license"], header["license_name"]) == (
        "image-classification",
        "other",
        "none",
    )
    for words in ("selection map, not an annotation", "licence: none", "overconfident", "logits / 1.5000"):
        assert words in text


def test_without_an_expectation_the_card_says_why(facts: dict[str, Any]) -> None:
    assert "all images come from one site, berlin" in card(facts)
    facts["data"]["sites"].append("lyon")
    assert "Not known: no site was left out" in card(facts)


def test_models_of_identical_images_say_so(facts: dict[str, Any]) -> None:
    assert "look the same to this model" not in card(facts)
    assert "neither confidence nor the flag means anything" in card(facts | {"unlike_threshold": SAME / 10})


@pytest.mark.parametrize("method", ["patchgen-select", "patchgen-select+entropy", "patchgen"])
def test_the_card_and_the_page_on_masks_say_the_same_of_a_method(method: str, facts: dict[str, Any]) -> None:
    facts["settings"]["method"] = method
    selects = "reads only what is bright; the backbone's own mixing remains"
    assert selects in re.sub(r"[\s*]+", " ", MASKS.read_text(encoding="utf-8"))
    assert (selects in card(facts)) == method.startswith("patchgen-select")
    assert "A mask is" in card(facts) and "A mask is" not in card(facts | {"has_mask": False})


def test_the_choice_of_a_method_and_what_to_expect_are_tables(facts: dict[str, Any]) -> None:
    comparison = {"method": "patchgen", "against": "lp", "difference": 0.05, "better": 9, "worse": 3, "needed": 0.02,
                  "shown": True}  # fmt: skip
    choice = {"accuracy": {"lp": {"lyon": 0.75}, "patchgen": {"lyon": 0.8}}, "counted": {"lyon": "lp"}, "images": 50,
              "chosen": "patchgen", "comparisons": [comparison]}  # fmt: skip
    fold = {"site": "lyon", "accuracy": 0.75, "images": 50, "validation": 0.9, "uncovered": ["cat"]}
    expected = {"mean": 0.75, "new_site": [0.5, 1.0], "interval": [0.6, 0.9]}
    text = card(facts | {"choice": choice, "folds": [fold], "expected": expected})
    assert "| lyon | 0.750 | 0.800 | lp |" in text and "| lyon | 0.750 | 50 | 0.900 | cat |" in text
    assert "between 0.500 and 1.000 and the mean over many sites between 0.600 and 0.900" in text
    assert "+5.0 points" in text and "patchgen is better" in text and "correction `patchgen` has 0.800" in text

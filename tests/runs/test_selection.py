"""The named rules that choose a checkpoint, and the recovery of masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from patchgen.runs.selection import RULES, best
from patchgen.tasks.metrics import mask_recovery


def record(step: int, site_a: float, site_b: float, unseen: float) -> dict[str, Any]:
    """Accuracies as given; F1 turns their order around."""
    both = {name: {"accuracy": value, "f1": 1 - value} for name, value in (("site_a", site_a), ("site_b", site_b))}
    return {"step": step, "validation": both, "oracle": {"accuracy": unseen, "f1": 1 - unseen}}


RECORDS = [
    record(0, 0.25, 0.25, 0.75),
    record(10, 0.75, 0.5, 0.25),
    record(20, 0.5, 0.75, 0.875),  # the same mean as step 10
    record(30, 1.0, 0.0, 0.875),
]


@pytest.mark.parametrize(
    ("rule", "metric", "step"),
    [
        ("source-validation", "accuracy", 20),
        ("source-validation", "f1", 0),
        ("last", "accuracy", 30),
        ("last", "f1", 30),
        ("oracle", "accuracy", 30),
        ("oracle", "f1", 10),
    ],
)
def test_of_equal_scores_the_most_recent_is_chosen(rule: str, metric: str, step: int) -> None:
    assert best(RECORDS, rule, metric)["step"] == step
    assert RULES[rule](best(RECORDS, rule, metric), metric) == max(RULES[rule](r, metric) for r in RECORDS)


def test_source_validation_is_a_plain_mean_of_domains_and_blind_to_the_unseen() -> None:
    one = record(0, 0.2, 0.6, 0.0)
    one["validation"]["site_a"]["images"] = 1000  # a large domain weighs no more than a small one
    assert RULES["source-validation"](one, "accuracy") == pytest.approx(0.4)
    del one["oracle"]
    assert RULES["source-validation"](one, "accuracy") == pytest.approx(0.4)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_mask_recovery_equals_the_plain_definitions(inside: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 5, (3, 8)) / 4  # ties, and values at the threshold
    truth = np.stack([rng.permutation(8) < inside for _ in range(3)])
    found = mask_recovery(mask, truth)
    for i in range(3):
        assert found["auroc"][i] == pytest.approx(roc_auc_score(truth[i], mask[i]))
        chosen, true = {p for p in range(8) if mask[i, p] >= 0.5}, set(np.flatnonzero(truth[i]))
        assert found["iou"][i] == pytest.approx(len(chosen & true) / len(chosen | true))
        assert found["kept"][i] == pytest.approx(len(chosen & true) / len(true))
        assert found["error"][i] == pytest.approx(sum(abs(mask[i, p] - (p in true)) for p in range(8)) / 8)


def test_a_ranking_of_all_patches_is_undefined() -> None:
    assert np.isnan(mask_recovery(np.full((1, 4), 0.7), np.ones((1, 4), dtype=bool))["auroc"]).all()

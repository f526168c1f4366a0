"""Named rules for selecting the checkpoint that a run reports.

A rule scores one evaluation; the highest score wins, and ties keep the most recent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def source_validation(record: Mapping[str, Any], metric: str) -> float:
    """Mean of the metric over the source domains' held-out parts: the usual default, without the unseen domain."""
    scores = [domain[metric] for domain in record["validation"].values()]
    return sum(scores) / len(scores)


def last(record: Mapping[str, Any], metric: str) -> float:
    """The last evaluation."""
    return float(record["step"])


def oracle(record: Mapping[str, Any], metric: str) -> float:
    """The held-out part of the UNSEEN domain: an upper bound, not a result."""
    return float(record["oracle"][metric])


RULES: dict[str, Callable[[Mapping[str, Any], str], float]] = {
    "source-validation": source_validation,
    "last": last,
    "oracle": oracle,
}


def best(records: list[dict[str, Any]], rule: str, metric: str) -> dict[str, Any]:
    """The evaluation that the rule chooses (ties: the most recent)."""
    return max(reversed(records), key=lambda record: RULES[rule](record, metric))

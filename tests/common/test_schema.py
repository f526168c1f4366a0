"""Dataclasses filled from JSON: each type and range, right and wrong, by name."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from patchgen.common.untrusted import filled, number


@dataclass(frozen=True)
class Inner:
    width: int = number(1, 4096)


@dataclass(frozen=True)
class Facts:
    width: int = number(1, 4096)
    mean: tuple[float, float, float] = number(0, 1, (0.5, 0.5, 0.5))
    eps: float = number(1e-12, 1.0, 1e-6)
    kind: Literal["plain", "gated"] = "plain"
    heads: int | None = number(1, 64, None)
    names: list[str] = field(default_factory=list)
    inner: Inner | None = None
    span: tuple[float, float] | None = None
    bias: bool = True
    more: dict[str, Any] = field(default_factory=dict)


RIGHT = {"width": 64, "mean": [0, 0.5, 1], "eps": 1, "kind": "gated", "heads": None, "names": ["a"],
         "inner": {"width": 2}, "span": None, "bias": False, "more": {"x": 1}, "unknown": object}  # fmt: skip


def test_a_right_object_is_filled() -> None:
    facts = filled(Facts, RIGHT, "config.json")
    assert facts == Facts(64, (0, 0.5, 1), 1, "gated", None, ["a"], Inner(2), None, False, {"x": 1})
    assert filled(Facts, {"width": 1}, "config.json") == Facts(1)


@pytest.mark.parametrize(("change", "rule"), [
    ({"width": "64"}, "width must be a whole number from 1 to 4096, not '64'"),
    ({"width": True}, "width must be a whole number"),
    ({"width": 0}, "from 1 to 4096, not 0"),
    ({"width": 10**400}, "from 1 to 4096"),
    ({"width": 1.5}, "whole number"),
    ({"eps": float("nan")}, "eps must be a finite number from 1e-12 to 1, not nan"),
    ({"eps": -1}, "not -1"),
    ({"eps": None}, "not None"),
    ({"kind": "odd"}, "kind must be one of plain, gated, not 'odd'"),
    ({"kind": ["plain"]}, "one of plain, gated"),
    ({"heads": 65}, "heads must be a whole number from 1 to 64 or null, not 65"),
    ({"mean": [0.1, 0.2]}, "mean must be a list of 3"),
    ({"mean": [0.1, 0.2, float("inf")]}, "each a finite number from 0 to 1"),
    ({"mean": 0.5}, "mean must be a list of 3"),
    ({"names": ["a", 1]}, "names must be a list of values, each text"),
    ({"names": "a"}, "names must be a list"),
    ({"inner": {"width": 5000}}, "inner: width must be a whole number"),
    ({"inner": {}}, "inner has no width"),
    ({"inner": 3}, "inner must be an object or null"),
    ({"bias": 1}, "bias must be true or false, not 1"),
    ({"more": []}, "more must be `name: value` pairs"),
    ({"names": ["x" * 200_000]}, "each text"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_a_wrong_field_is_named_with_its_rule_and_value(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as caught:
        filled(Facts, {**RIGHT, **change}, "config.json")
    assert str(caught.value).startswith("config.json") and len(str(caught.value)) < 400


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="config.json has no width"):
        filled(Facts, json.loads("{}"), "config.json")

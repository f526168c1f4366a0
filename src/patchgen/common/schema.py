"""Checked objects from untrusted JSON: a dataclass declares types and ranges, and one function fills it.

    @dataclass(frozen=True)
    class Sizes:
        width: int = number(1, 4096)
        kind: Literal["plain", "gated"] = "plain"
        names: list[str] = field(default_factory=list)

    sizes = filled(Sizes, {"width": 64}, "config.json")    # a ValueError names the field, its rule and its value

Supported types: bool, int, float (finite), str, Literal, X | None, list[X], tuple[X, X, X], dict and dataclasses.
An int is accepted as a float, a bool as neither. Unknown fields are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, field
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from patchgen.common.untrusted import shortly

T = TypeVar("T")
LONGEST = 100_000  # characters of a string, members of a list
PLAIN = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", NoneType: "null"}


def number(least: float, most: float, default: Any = MISSING) -> Any:
    """A field whose number, or whose numbers, lie between two bounds, both included."""
    return field(default=default, metadata={"range": (least, most)})


def filled(kind: type[T], values: Mapping[str, Any], where: object) -> T:
    """An instance of the dataclass `kind` from a JSON object; `where` (usually its file) starts every message.

    Raises:
        ValueError: a field is missing, or has the wrong type or a value out of its range.
    """
    hints, checked = get_type_hints(kind), {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        if one.name in values:
            value, bounds = values[one.name], one.metadata.get("range")
            rule = _broken_rule(value, hints[one.name], bounds)
            if rule:
                raise ValueError(f"{where}: {one.name} must be {rule}, not {shortly(value)}")
            checked[one.name] = _converted(value, hints[one.name], f"{where}: {one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where} has no {one.name}")
    return kind(**checked)


def _broken_rule(value: Any, hint: Any, bounds: tuple[float, float] | None) -> str:
    """The rule that a value breaks, in words; empty if it breaks none."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        rules = [_broken_rule(value, member, bounds) for member in members]
        return "" if "" in rules else " or ".join(rules)
    if origin is Literal:
        known = any(type(value) is type(member) and value == member for member in members)
        return "" if known else f"one of {', '.join(map(str, members))}"
    if origin in (list, tuple):
        count, plain = len(members) if origin is tuple else None, isinstance(value, list)
        fits = plain and (len(value) == count if count else len(value) <= LONGEST)
        rules = [_broken_rule(member, members[0], bounds) for member in (value if fits else [])]
        inner = next((f", each {rule}" for rule in rules if rule), "")
        return "" if fits and not inner else f"a list of {count or 'values'}{inner}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "" if isinstance(value, dict) else "an object"
    accepted: Any = (int, float) if hint is float else hint
    plain = isinstance(value, accepted) and (hint is bool or not isinstance(value, bool))
    if hint in (int, float):
        low, high = bounds or (-math.inf, math.inf)
        rule = PLAIN[hint] + (f" from {low:g} to {high:g}" if bounds else "")
        return "" if plain and abs(value) < math.inf and low <= value <= high else rule
    return "" if plain and not (hint is str and len(value) > LONGEST) else PLAIN[hint]


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A checked value with lists as declared tuples, and objects as dataclasses."""
    for member in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if dataclasses.is_dataclass(member) and isinstance(value, dict):
            return filled(member, value, where)  # type: ignore[arg-type]
        if get_origin(member) is tuple:
            return tuple(value)
    return value

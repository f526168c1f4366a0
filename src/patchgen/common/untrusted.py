"""Read untrusted JSON, YAML and weight files within limits: a small file cannot become a large value or a long message.

YAML aliases can expand a kilobyte to gigabytes: they count with their expanded length. Weights are read into memory:
truncating a memory-mapped file would kill its readers, and bytes written to it would change the weights immediately.
"""

import dataclasses
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, field
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from patchgen.common.files import refuse_pipe

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 26  # of a file
MOST_YAML = 1 << 22  # characters of a file, with its aliases written out
MOST_DEPTH = 50

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 6
_short.maxstring = _short.maxlong = _short.maxother = 120
_short.maxlevel = 3


def shortly(value: Any) -> str:
    """The `repr` of an untrusted value, for a message, with bounded length."""
    return _short.repr(value)


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError: not readable as JSON, nested too deeply, too long, or not an object."""
    try:
        value = json.loads(_read(path, MOST_BYTES))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5000 digits, nested too deep
        raise ValueError(f"{path} is not readable JSON ({type(error).__name__}: {error!s:.200})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]  # fmt: skip
    if level:
        raise ValueError(f"{path} is nested deeper than {MOST_DEPTH} levels, more than such a file needs")
    return value


def read_yaml(path: str | Path) -> Any:
    """The value in a YAML file; ValueError: not readable as YAML, or with its aliases too deep or too long."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former, where it was built, is ten times as fast
    try:
        text = _read(path, MOST_YAML).decode("utf-8")
        _check_events(text, loader)
        return yaml.load(text, Loader=loader)  # a safe loader
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # also a date such as 2024-13-45
        raise ValueError(f"{path} is not readable YAML: {' '.join(str(error).split())[:400]}") from error


def _read(path: str | Path, most: int) -> bytes:
    refuse_pipe(path)
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is longer than {most:,} bytes, more than such a file needs")
    return data


def _check_events(text: str, loader: Any) -> None:
    """Check length and depth of the value with all aliases expanded, before it is built."""
    import yaml

    known: dict[str, tuple[int, int]] = {}  # (length, depth) of what an anchor names
    open_ones: list[tuple[str | None, list[tuple[int, int]]]] = [(None, [])]
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent) and len(open_ones) <= MOST_DEPTH:
            open_ones.append((event.anchor, []))
            continue
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in known:
                raise ValueError(f"the alias *{event.anchor!s:.40} appears inside what it names, or before it")
            anchor, size = None, known[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, (len(event.value) + 1, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, members = open_ones.pop()
            size = sum(length for length, _ in members) + 1, max((depth for _, depth in members), default=0) + 1
        elif isinstance(event, yaml.CollectionStartEvent):
            anchor, size = None, (0, MOST_DEPTH)
        else:
            continue
        if size[0] > MOST_YAML or size[1] + len(open_ones) > MOST_DEPTH:
            raise ValueError(f"with its aliases written out it is longer than {MOST_YAML:,} characters, or nested "
                             f"deeper than {MOST_DEPTH} levels")  # fmt: skip
        if anchor:
            known[anchor] = size
        open_ones[-1][1].append(size)


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Tensors and metadata of a .safetensors file; raises ValueError."""
    refuse_pipe(path)
    return parse_tensors(path.read_bytes(), str(path))


def parse_tensors(data: bytes, name: str) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The same of the bytes of a file with this name."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)  # checks the header
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    # the library also raises built-in errors, for types that torch lacks and for shapes that do not fit
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{name} is not a readable .safetensors file ({type(error).__name__}: {error!s:.200})"
        ) from error
    return tensors, metadata


# Checked objects

T = TypeVar("T")
LONGEST = 100_000  # characters of a string, members of a list
PLAIN = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", NoneType: "null"}


def number(least: float, most: float, default: Any = MISSING) -> Any:
    """A field whose number, or whose numbers, lie between two bounds, both included."""
    return field(default=default, metadata={"range": (least, most)})


def filled(kind: type[T], values: Mapping[str, Any], where: object) -> T:
    """An instance of the dataclass `kind` from a JSON object `where`; ValueError: a field is missing or wrong."""
    hints, checked = get_type_hints(kind), {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        if one.name in values:
            value, bounds = values[one.name], one.metadata.get("range")
            rule = broken_rule(value, hints[one.name], bounds)
            if rule:
                raise ValueError(f"{where}: {one.name} must be {rule}, not {shortly(value)}")
            checked[one.name] = _converted(value, hints[one.name], f"{where}: {one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where} has no {one.name}")
    return kind(**checked)


def broken_rule(value: Any, hint: Any, bounds: tuple[float, float] | None = None) -> str:
    """The rule that a value breaks, in words; empty if it breaks none."""
    origin, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return ""
    if origin in (Union, UnionType):
        rules = [broken_rule(value, member, bounds) for member in members]
        return "" if "" in rules else " or ".join(rules)
    if origin is Literal:
        known = any(type(value) is type(member) and value == member for member in members)
        names = ", ".join(map(str, members))
        return "" if known else f"one of {names}" if len(members) > 1 else names
    if origin in (list, tuple):
        count, plain = len(members) if origin is tuple else None, isinstance(value, (list, tuple))
        fits = plain and (len(value) == count if count else len(value) <= LONGEST)
        rules = [broken_rule(member, members[0], bounds) for member in (value if fits else [])]
        return _each(f"a list of {count or 'values'}", fits, rules)
    if origin is dict:
        fits = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        rules = [broken_rule(member, members[1], bounds) for member in (value.values() if fits else [])]
        return _each("`name: value` pairs", fits, rules)
    if dataclasses.is_dataclass(hint):
        return "" if isinstance(value, dict) else "an object"
    plain = isinstance(value, (int, float) if hint is float else hint) and isinstance(value, bool) == (hint is bool)
    if hint in (int, float):
        low, high = bounds or (-math.inf, math.inf)
        rule = PLAIN[hint] + (f" from {low:g} to {high:g}" if bounds else "")
        return "" if plain and abs(value) < math.inf and low <= value <= high else rule
    return "" if plain and not (hint is str and len(value) > LONGEST) else PLAIN[hint]


def outside(value: float, interval: str) -> str:
    """The rule that a number breaks, in words; empty if it is in the interval, such as `[0, 1)`."""
    low, high = map(float, interval[1:-1].split(","))
    if not value >= low or (value == low and interval[0] == "("):  # also what is no number
        return f"at least {low:g}" if interval[0] == "[" else f"above {low:g}"
    if value > high or (value == high and interval[-1] == ")"):
        return f"at most {high:.10g}" if interval[-1] == "]" else f"below {high:g}"
    return ""


def _each(whole: str, fits: bool, rules: list[str]) -> str:
    inner = next((f", each {rule}" for rule in rules if rule), "")
    return "" if fits and not inner else whole + inner


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A checked value with lists as declared tuples, and objects as dataclasses."""
    for member in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if dataclasses.is_dataclass(member) and isinstance(value, dict):
            return filled(member, value, where)  # type: ignore[arg-type]
        if get_origin(member) is tuple and isinstance(value, list):
            return tuple(value)
    return value

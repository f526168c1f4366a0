"""Text helpers: a common key for spelling variants of a name, suggestions for misspelt names, safe output."""

import difflib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any


def name_key(name: str) -> str:
    """Letters and digits only, lower case: `Real World`, `Real_World` and `RealWorld` share one key."""
    return re.sub(r"[\W_]", "", name.casefold())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """\"; did you mean 'x'?\", or an empty string if no known name is close."""
    by_key = {name_key(name): name for name in known}
    near = difflib.get_close_matches(name_key(word), by_key, 1)
    return f"; did you mean {by_key[near[0]]!r}?" if near else ""


def printable(text: object) -> str:
    """Text for a terminal, on one line: control characters, which can move the cursor or set its title, are escaped."""
    words = str(text).encode("utf-8", "backslashreplace").decode()
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in words)


def first_line(error: Exception) -> str:
    """Type and first line of another library's error, shortened to fit into a message."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def number_text(value: Any, percent: bool = False) -> str:
    """`0.91`, or `91.2` in per cent; a dash for None, text unchanged."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{100 * value:.1f}" if percent else f"{value:.2f}"


def plus_minus(mean: float, error: float | None = None, digits: int = 1, sign: str = "") -> str:
    """`84.1 ± 0.3`, or `84.1` without an error; `sign="+"` writes the sign of a difference."""
    return f"{mean:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def csv_cell(text: str) -> str:
    """A cell that a spreadsheet reads as text or a number, never as a formula."""
    if text[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, as readable in a terminal as on a page."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def duration(seconds: float) -> str:
    """45 s, 12.5 min, 3.4 h, 2.1 days."""
    for size, word in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.0f} s"


def json_text(value: Any, indent: int | None = 2) -> str:
    """JSON that every parser reads: NaN and infinity, which JSON lacks, become null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_with_null(value), indent=indent, allow_nan=False)


def _with_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_null(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_null(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

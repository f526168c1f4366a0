"""Names that people spell in several ways: one key for all of them, and a suggestion for a misspelt one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def name_key(name: str) -> str:
    """Letters and digits only, lower case: `Real World`, `Real_World` and `RealWorld` share one key."""
    return re.sub(r"[\W_]", "", name.casefold())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """\"; did you mean 'x'?\", or nothing where no known name is near."""
    by_key = {name_key(name): name for name in known}
    near = difflib.get_close_matches(name_key(word), by_key, 1)
    return f"; did you mean {by_key[near[0]]!r}?" if near else ""

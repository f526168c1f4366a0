"""The result of a check: its status, a sentence and the fix.

worst([Check("layout", "pass", "3 domains"), Check("groups", "warn", "a patient on both sides", "Split by group.")])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("pass", "warn", "fail")
SHOWN = 3  # examples in a detail


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty when nothing has to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def worst(checks: Iterable[Check]) -> Status:
    """The most severe status of the checks; "pass" for none."""
    return max((check.status for check in checks), key=SEVERITY.index, default="pass")


def some(texts: Sequence[str]) -> str:
    """The first few of the texts, and how many more there are."""
    more = f", and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more

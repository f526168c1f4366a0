"""SECURITY.md names tests that are there, and every file of attacks stands behind a promise."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_promise_names_its_tests() -> None:
    text = (HERE.parents[1] / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", text)
    lost = [name for name in named if not (HERE.parents[1] / name if "/" in name else HERE / name).is_file()]
    assert not lost
    assert {file.name for file in HERE.glob("test_*.py")} - {Path(__file__).name} <= set(named)

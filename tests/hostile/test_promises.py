"""SECURITY.md and docs/develop/reliability.md name tests that exist, and every file of attacks belongs to a promise."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_promise_names_its_tests() -> None:
    text = (HERE.parents[1] / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", text)
    lost = [name for name in named if not (HERE.parents[1] / name if "/" in name else HERE / name).is_file()]
    assert not lost
    pages = (HERE.parents[1] / "docs" / "develop" / "reliability.md").read_text(encoding="utf-8")
    tests = re.findall(r"`(tests/[\w/]*test_\w+\.py)`", pages)
    assert tests and all((HERE.parents[1] / name).is_file() for name in tests)
    assert {file.name for file in HERE.glob("test_*.py")} - {Path(__file__).name} <= set(named)

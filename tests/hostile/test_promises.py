"""SECURITY.md and docs/develop/reliability.md name tests that exist, and every file of attacks belongs to a promise."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_each_promise_names_its_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(test_\w+))?`", text)
    for name, function in named:
        content = (ROOT / name if "/" in name else HERE / name).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in content, (name, function)
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(rows) > 10 and all(".py" in row.rsplit("|", 2)[1] for row in rows)
    pages = (ROOT / "docs" / "develop" / "reliability.md").read_text(encoding="utf-8")
    tests = re.findall(r"`(tests/[\w/]*test_\w+\.py)`", pages)
    assert tests and all((ROOT / name).is_file() for name in tests)
    assert {file.name for file in HERE.glob("test_*.py")} - {Path(__file__).name} <= {name for name, _ in named}

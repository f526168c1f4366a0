"""The table of docs/use/encoders.md has every family, loaded or refused as it is, and its figures are rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.encoders import EXAMPLES, REFUSED, TIMM, Example, line, refused_row, timm_row, transformers_row

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "encoders.md").read_text(encoding="utf-8")
ROUNDING = 1e-6


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_a_family_of_transformers_is_as_the_page_says(example: Example, tmp_path: Path) -> None:
    row = transformers_row(example, tmp_path)
    assert line(row) in PAGE.splitlines()
    assert row.difference is None or row.difference <= ROUNDING
    assert row.loaded == (row.difference is not None) and row.loaded != bool(row.reason)


@pytest.mark.parametrize("name", TIMM)
def test_a_network_of_timm_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = timm_row(name, TIMM[name], tmp_path)
    assert line(row) in PAGE.splitlines() and row.selects
    assert row.difference is not None and row.difference <= ROUNDING


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_network_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = refused_row(name, tmp_path)
    assert line(row) in PAGE.splitlines() and "timm:NAME" in row.reason

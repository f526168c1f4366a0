"""The best of a column is marked where it is better by more than chance, in every form a table takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from patchgen.cli import main
from patchgen.report.render import to_latex, to_markdown, to_terminal
from patchgen.report.table import Number, is_beyond_error
from patchgen.report.tables import fold_grids
from patchgen.report.write import render_page
from patchgen.runs.scores import read_runs


def number(*values: float, first: int = 1) -> Number:
    return Number(dict(enumerate(values, first)), ("run",), 80, "source-validation", "in")


@pytest.mark.parametrize("other", [(70, 75, 71), (72, 74, 77), (60, 61, 62), (70.1, 75.2, 79.0), (71, 76, 81)])
def test_it_agrees_with_a_paired_t_test(other: tuple[float, ...]) -> None:
    ours = (72.0, 76.5, 80.0)
    found = ttest_rel(ours, other)
    wanted = bool(found.pvalue < 0.05 and found.statistic > 0)
    assert is_beyond_error(number(*ours), number(*other)) == wanted


def test_it_needs_two_seeds_that_both_have() -> None:
    assert not is_beyond_error(number(90.0), number(10.0))
    assert not is_beyond_error(number(90.0, 91.0), number(10.0, 11.0, first=2))
    assert is_beyond_error(number(90.0, 91.0), number(10.0, 11.2))


def make(fold: Callable[..., Path], method: str, *values: float) -> list[Path]:
    return [fold(value, method=method, seed=seed) for seed, value in enumerate(values, 1)]


def test_the_leader_is_marked_in_every_form(fold: Callable[..., Path]) -> None:
    paths = make(fold, "lp", 0.60, 0.61, 0.62) + make(fold, "lp-ln", 0.70, 0.71, 0.721)
    paths += make(fold, "patchgen-true-mask", 0.95, 0.96, 0.97)  # an upper bound takes no part
    [grid] = fold_grids(read_runs(paths)[0], "in")
    head, rows, _ = to_terminal(grid)
    cells = {row[0]: row[head.index("sketch")] for row in rows}
    assert cells["lp-ln"] == "71.0 ± 0.6 (best)" and "best" not in cells["lp"] + cells["patchgen-true-mask"]
    assert "**71.0 ± 0.6**" in to_markdown(grid) and r"\textbf{71.0 $\pm$ 0.6}" in to_latex(grid)
    assert "<strong>71.0 ± 0.6</strong>" in render_page([grid], {}, 9, [], "in")


def test_report_prints_its_tables_and_the_page_alone_on_stdout(
    fold: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = make(fold, "lp", 0.60, 0.66, 0.62) + make(fold, "lp-ln", 0.63, 0.62, 0.69)
    out = str(tmp_path / "out")
    assert main(["report", str(paths[0].parent), "--out", out]) == 0
    printed = capsys.readouterr()
    assert "64.7 ± 2.2" in printed.err and "PACS" in printed.err and "best" not in printed.err  # 2.0 ± 3.2 is nothing
    assert printed.out == f"{out}/report.html\n"
    assert main(["report", str(paths[0].parent), "--out", out, "--quiet"]) == 0
    assert capsys.readouterr().out == f"{out}/report.html\n"

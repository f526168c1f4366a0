"""Growth of the bookkeeping: generated folders are what a run writes, and figures are those of the work."""

from pathlib import Path

import pytest

from benchmarks import common, flat
from benchmarks.bookkeeping import write_runs
from patchgen.report.write import make_grids
from patchgen.runs.scores import read_runs


def test_generated_runs_are_read_as_finished_ones(tmp_path: Path) -> None:
    runs, skipped = read_runs([write_runs(tmp_path, 61)])
    assert runs["path"].nunique() == 61 and not skipped
    assert set(runs["method"]) == {"method-0000", "method-0001"}
    grid = next(grid for grid in make_grids(runs, "in") if grid.name == "mdg-pacs")
    number = grid.lines[0].entries[0].number
    assert number is not None and number.tried == 5 and len(number.values) == 3


def test_cpu_share_of_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "STAT", tmp_path / "stat")
    monkeypatch.setattr(common.os, "sysconf", lambda name: 100)
    times = iter([(0.0, 0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 1.0, 0.0, 0.0)])
    monkeypatch.setattr(common.os, "times", lambda: next(times))
    (tmp_path / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    others = common.Others()
    (tmp_path / "stat").write_text("cpu  500 0 100 400 0 0 0 0 0 0\n")  # ten seconds, six of them busy, two our own
    assert others.share() == pytest.approx(0.4)
    monkeypatch.setattr(others, "share", lambda: 0.4)
    assert "other programs took 40%" in others.verdict()
    monkeypatch.setattr(others, "share", lambda: 0.1)
    assert others.verdict() == ""
    monkeypatch.setattr(common, "STAT", tmp_path / "nowhere")
    assert common.Others().share() is None


def test_memory_is_that_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patchgen predict failed: .*no image found"):
        flat.peak_bytes(["predict", str(tmp_path / "nothing-here"), str(tmp_path)])
    [line] = flat.lines({"images": {"counts": [1, 9], "bytes": [100e6, 120e6], "ratio": 1.2}})
    assert line == ("peak memory over images: 1 to 9, 100, 120 MB", "1.20", "<= 1.1", False)

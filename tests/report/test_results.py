"""Runs as rows of a CSV file, and tables from it: planted rows with means and errors that can be counted by hand."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.cli import main
from patchgen.report.results import COLUMNS, collect, read_rows, tables

Row = dict[str, str]


def row(method: str, unseen: str, seed: int, accuracy: float, **more: str) -> Row:
    return {**dict.fromkeys(COLUMNS, ""), "data": "d", "method": method, "unseen": unseen, "seed": str(seed),
            "accuracy": str(accuracy), **more}  # fmt: skip


def table(*words: Any, **more: Any) -> str:
    """The tables with single blanks."""
    return re.sub(r"-{2,}", "---", re.sub(r" +", " ", tables(*words, **more)))


ROWS = [
    row("base", "a", 1, 0.5), row("base", "a", 2, 0.7), row("base", "b", 1, 0.4), row("base", "b", 2, 0.4),
    row("ours", "a", 1, 0.6), row("ours", "a", 2, 0.9), row("ours", "b", 1, 0.3),
]  # fmt: skip


TRAINED = row("ours", "a", 1, 0.6, auroc="0.9", untrained_auroc="0.4")
SUMS = [row("base", "a", 1, 0.5), row("base+e", "a", 1, 0.7), row("ours", "a", 1, 0.6), row("ours+e", "a", 1, 0.9)]


@pytest.mark.parametrize(("rows", "options", "lines"), [
    (ROWS, {}, ["| method | d: a | d: b | mean | seeds |", "| base | 60.0 ± 10.0 | 40.0 ± 0.0 | 50.0 ± 10.0 | 2 |",
                "| ours | 75.0 ± 15.0 | 30.0 | 52.5 ± 22.5 | 2 |",
                "± is the standard error over seeds; in mean, over folds."]),
    # paired over fold and seed, +10, +20 and -10 points: mean 6.7, deviation 15.3, error 8.8
    (ROWS, {"against": ["base"]}, ["| ours | 6.7 ± 8.8 | 3 | 2 |"]),
    # rows of one method are labelled by their differences
    ([row("ours", "a", 1, 0.5, lr="0.1"), row("ours", "a", 1, 0.6, lr="0.3"), row("base", "a", 1, 0.4, lr="0.1")], {},
     ["| ours, lr 0.1 | 50.0 |", "| ours, lr 0.3 | 60.0 |", "| base | 40.0 |"]),
    # scores of one fold share a table
    ([row("ours", "a", 1, 0.6, auroc="0.8"), row("ours", "a", 2, 0.9, auroc="0.9"), row("base", "a", 1, 0.5)],
     {"scores": ["accuracy", "auroc"]}, ["d, unseen: a", "| ours | 75.0 ± 15.0 | 0.85 ± 0.05 | 2 |",
                                        "| base | 50.0 | | 1 |"]),
    # the untrained mask stands beside the trained one
    ([TRAINED, row("base", "a", 1, 0.5)], {"scores": ["accuracy", "auroc"]},
     ["| method | accuracy (%) | AUROC | AUROC, untrained | seeds |"]),
    ([TRAINED, TRAINED | {"unseen": "b"}], {"scores": ["auroc"]}, ["The same AUROC of the untrained mask"]),
    # a sum is compared with the baseline's sum
    (SUMS, {"against": ["base"]}, ["| ours | 10.0 |", "| base+e | 20.0 |", "| ours+e (minus base+e) | 20.0 |"]),
    ([row("lp-ln", "a", 1, 0.5), row("patchgen+e", "a", 1, 0.9)], {"against": ["lp-ln"]},
     ["| patchgen+e | 40.0 |", "train lp-ln+e"]),
])  # fmt: skip
def test_tables_by_hand(rows: list[Row], options: dict[str, Any], lines: list[str]) -> None:
    text = table(rows, **options)
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize(("changes", "against", "message"), [
    ({"steps": "101"}, [], "rows of d have several values of steps, 101, 61; choose with --only"),
    ({}, ["bse"], "no row is called 'bse'"),
])  # fmt: skip
def test_what_cannot_share_a_table(changes: Row, against: list[str], message: str) -> None:
    rows = [row("base", "a", 1, 0.5, steps="61"), row("base", "a", 2, 0.6, **{"steps": "61"} | changes)]
    with pytest.raises(ValueError, match=message):
        tables(rows, against=against)


def test_runs_are_collected_once_and_outlive_their_folders(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    run = tiny_run("patchgen-select")
    file = tmp_path / "data" / "results.csv"
    new, total = collect([run.path], file)
    assert (new, total) == (1, 1)
    [found] = read_rows(file)
    assert read_rows(run.path) == [found]  # a folder of runs makes the same rows
    [test] = [r for r in run.records("test") if r["checkpoint"] == "selected"]
    assert found["run"] == run.path.name and found["method"] == "patchgen-select" and found["unseen"] == "studio"
    assert float(found["accuracy"]) == pytest.approx(test["all"]["accuracy"], abs=1e-5)
    assert float(found["swad"]) >= 0 and found["auroc"] == ""
    other = tiny_run("lp-ln")
    assert collect([other.path], file) == (1, 2) and collect([other.path, run.path], file) == (0, 2)


def test_scores_of_known_and_new_classes_have_columns(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    run = tiny_run("lp-ln", task="mdg_gcd")
    [found] = read_rows(run.path)
    [test] = [r for r in run.records("test") if r["checkpoint"] == "selected"]
    expected = {name: test["all"][name] for name in ("accuracy", "known", "unknown", "taken_for_known")}
    expected |= {f"{name}_by_name": test["by_name"][name] for name in ("known", "unknown")}
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected, abs=1e-5)
    assert "| method | known (%) | taken for known (%) | seeds |" in table([found], ["known", "taken_for_known"])


def test_a_csv_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    columns = [name for name in COLUMNS if name not in ("known", "unknown")]
    (tmp_path / "old.csv").write_text(",".join(columns) + "\n" + ",".join("1" for _ in columns) + "\n")
    [found] = read_rows(tmp_path / "old.csv")
    assert tuple(found) == COLUMNS and (found["known"], found["swad"]) == ("", "1")


def test_the_commands(tiny_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.csv"
    assert main(["runs", "collect", str(tiny_run("lp-ln").path), "--csv", str(file)]) == 0
    assert "1 new, 1 rows" in capsys.readouterr().out
    assert main(["runs", "table", str(file), "--scores", "accuracy", "--only", "hparams", "", "method", "lp-ln"]) == 0
    assert "| lp-ln " in capsys.readouterr().out
    assert main(["runs", "table", str(file), "--scores", "acuracy"]) != 0
    assert "did you mean 'accuracy'" in capsys.readouterr().err
    assert main(["runs", "table", str(file), "--only", "method", "x"]) != 0
    file.write_text("a,b\n1,2\n")
    assert main(["runs", "table", str(file)]) != 0
    assert "must have the columns" in capsys.readouterr().err

"""Tables from runs: means, standard errors and choices worked out by hand, the paper's numbers, what is missing."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import ttest_rel

from patchgen.cli import main
from patchgen.report.ablation import ROWS, ablation_grids, ablation_row, sensitivity_grids
from patchgen.report.table import Column, Grid, Line, Number, best_runs, gather, is_beyond_error
from patchgen.report.tables import dataset_grids, discovery_grids, fold_grids, oracle_grids, stream_grids
from patchgen.report.write import RECIPES, absent, make_grids, render_page, to_latex, to_markdown, to_terminal
from patchgen.runs.scores import read_runs

Make = Callable[..., Path]
PACS = ("art_painting", "cartoon", "photo", "sketch")


def read(*paths: Path) -> pd.DataFrame:
    scores, skipped = read_runs(paths)
    assert not skipped
    return scores


def line(grid: Grid, label: str) -> Line:
    return next(one for one in grid.lines if one.label == label)


def means(one: Line) -> list[float | None]:
    return [None if entry.number is None else round(entry.number.mean, 6) for entry in one.entries]


def test_source_validation_chooses_among_settings_not_the_unseen_domain(fold: Make) -> None:
    tried = ((0.9, 1e-3, 0.5), (0.6, 1e-2, 0.7), (0.8, 1.0, 0.6))
    runs = read(*(fold(value, lr=lr, validation=validation) for value, lr, validation in tried))
    number = gather(best_runs(runs), Column("", {"PACS": ["sketch"]}), "in")
    assert number is not None and number.mean == pytest.approx(60) and number.tried == 3
    assert number.runs == (runs["run"].unique()[1],)


@pytest.mark.parametrize("other", [(70, 75, 71), (72, 74, 77), (60, 61, 62), (70.1, 75.2, 79.0), (71, 76, 81)], ids=str)
def test_the_best_is_marked_by_a_paired_t_test(other: tuple[float, ...]) -> None:
    ours = (72.0, 76.5, 80.0)
    test = ttest_rel(ours, other)
    wanted = bool(test.pvalue < 0.05 and test.statistic > 0)
    assert is_beyond_error(Number(dict(enumerate(ours))), Number(dict(enumerate(other)))) == wanted
    assert not is_beyond_error(Number({1: 90.0, 2: 91.0}), Number({2: 10.0, 3: 11.0}))  # one common seed


def seeds(fold: Make, method: str, *values: float) -> list[Path]:
    return [fold(value, method=method, seed=seed) for seed, value in enumerate(values, 1)]


def test_the_best_cell_is_marked_in_every_format(fold: Make) -> None:
    paths = seeds(fold, "lp", 0.60, 0.61, 0.62) + seeds(fold, "lp-ln", 0.70, 0.71, 0.721)
    paths += seeds(fold, "patchgen-true-mask", 0.95, 0.96, 0.97)  # an upper bound takes no part
    [grid] = fold_grids(read(*paths), "in")
    head, rows, _ = to_terminal(grid)
    cells = {row[0]: row[head.index("sketch")] for row in rows}
    assert cells["lp-ln"] == "71.0 ± 0.6 (best)" and "best" not in cells["lp"] + cells["patchgen-true-mask"]
    assert "**71.0 ± 0.6**" in to_markdown(grid) and r"\textbf{71.0 $\pm$ 0.6}" in to_latex(grid)
    assert "<strong>71.0 ± 0.6</strong>" in render_page([grid], {}, 9, [], "in")


def test_report_prints_its_tables_and_the_page_alone_on_stdout(
    fold: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = seeds(fold, "lp", 0.60, 0.66, 0.62) + seeds(fold, "lp-ln", 0.63, 0.62, 0.69)
    words = ["report", str(paths[0].parent), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "64.7 ± 2.2" in printed.err and "PACS" in printed.err and "best" not in printed.err  # 2.0 ± 3.2 is nothing
    assert printed.out == f"{tmp_path}/out/report.html\n"
    assert main([*words, "--quiet"]) == 0 and capsys.readouterr().out == printed.out


def test_an_average_needs_every_domain_of_a_seed(fold: Make) -> None:
    paths = [fold(0.5 + 0.1 * i, unseen=name, seed=1) for i, name in enumerate(PACS)]
    paths += [fold(0.9, unseen=name, seed=2) for name in PACS[:3]]
    [grid] = fold_grids(read(*paths), "in")
    assert [column.heading for column in grid.columns] == [*PACS, "average"]
    own = line(grid, "lp-ln")
    assert means(own) == [70, 75, 80, 80, 65]  # seeds 1 and 2 where both are; sketch and the average have seed 1 alone
    assert own.entries[-1].number and own.entries[-1].number.values == {1: pytest.approx(65)}
    assert grid.seeds == 2


def test_averages_are_of_data_sets_not_of_domains(fold: Make) -> None:
    paths = [fold(0.8, unseen=name) for name in PACS]
    paths += [fold(0.4, unseen=f"location_{n}", data="data/terra_incognita") for n in (38, 43)]
    [grid] = dataset_grids(read(*paths), "in")
    assert [c.heading for c in grid.columns] == ["PACS", "TerraIncognita: location_38, location_43", "average"]
    assert means(line(grid, "lp-ln")) == [80, 40, 60]


def test_the_papers_lines_follow_ours_and_keep_their_stars(fold: Make) -> None:
    [grid] = fold_grids(read(*(fold(0.8, swad_value=0.9, unseen=name) for name in PACS)), "in")
    assert [(one.label, one.rerun) for one in grid.lines if one.paper][:3] == [
        ("LP+LN, DINOv2 ViT-B/14", True), ("LP+LN, MAE ViT-B/16", True), ("LP+LN, DINOv2 ViT-L/14", True),
    ]  # fmt: skip
    entry = line(grid, "LP+LN, DINOv2 ViT-B/14").entries[-1]
    assert entry.paper and (entry.paper.value, entry.paper.swad) == (96.2, False)
    swad = line(grid, "LP+LN + SWAD, DINOv2 ViT-B/14").entries[-1]
    assert swad.paper and swad.paper.value == 96.7
    assert means(line(grid, "lp-ln + SWAD")) == [90] * 5


def test_only_the_papers_lines_of_our_backbone_are_shown(fold: Make) -> None:
    runs = read(*(fold(0.8, unseen=d, data="data/HISTOCOLON", backbone_name="facebook/dinov2-large", method="patchgen")
                  for d in ("CRC-TP", "K-16", "K-19")))  # fmt: skip
    [grid] = fold_grids(runs, "in")
    [paper] = [one for one in grid.lines if one.paper]
    assert paper.label == "PatchGen, DINOv2 ViT-L/14" and not paper.rerun
    assert all(entry.paper for entry in paper.entries)  # by domain, as printed


def test_missing_cells_name_the_command_that_fills_them(fold: Make) -> None:
    path = fold(0.8, unseen="photo")
    [grid] = fold_grids(read(path), "in")
    own = line(grid, "lp-ln")
    assert [entry.missing for entry in own.entries] == [True, True, False, True, True]
    [command] = grid.commands
    assert command == (
        f"for unseen in art_painting cartoon sketch; do patchgen train data/PACS --unseen \"$unseen\" --config "
        f"{path}/config.yaml --out {path.parent}; done"
    )  # fmt: skip


def test_another_evaluation_interval_is_another_table(fold: Make) -> None:
    vlcs_run = {"data": "data/VLCS", "unseen": "SUN09", "steps": 5001}
    paths = [fold(0.8, steps=5001, eval_every=100), *(fold(0.6, eval_every=n, **vlcs_run) for n in (50, 200))]
    runs = read(*paths).drop_duplicates("path")
    pacs, vlcs, rare = runs["setup"]
    assert pacs == vlcs != rare  # each data set's own protocol is one setup
    texts = runs["setup_text"].tolist()
    assert "steps: the data set's own" in texts[1] and "5001 steps evaluated every 200" in texts[2]


def test_other_scores_have_a_table_of_their_own(fold: Make) -> None:
    photo = fold(0.7, unseen="photo", scores={"auroc": 0.8, "macro_f1": 0.6})
    sketch = fold(0.7, unseen="sketch", scores={"auroc": 0.9})
    old = fold(0.5, unseen="sketch", method="lp")  # a record of an earlier version
    _, grid = fold_grids(read(photo, sketch, old), "in")
    assert [line.label for line in grid.lines] == ["lp-ln"] and "photo, sketch" in grid.notes[0]
    found = {column.heading: entry.number for column, entry in zip(grid.columns, grid.lines[0].entries, strict=True)}
    assert found["AUROC"] is not None and found["AUROC"].mean == pytest.approx(85)
    assert found["macro F1"] is None  # sketch lacks it


def test_unknown_classes(fold: Make) -> None:
    scores = {"known": 0.6, "unknown": 0.2}
    paths = [fold(0.5, unseen=name, task="mdg_gcd", scores=scores) for name in PACS]
    [grid] = discovery_grids(read(*paths), "in")
    assert means(line(grid, "lp-ln"))[-3:] == [50, 60, 20]
    paper = line(grid, "Baseline, DINOv2 ViT-B/14").entries[-3:]
    assert [entry.paper.value for entry in paper if entry.paper] == [96.18, 96.38, 96.45]


def test_streams(stream: Make) -> None:
    paths = [stream("promptccd", [(0.5, 0.6, 0.4), (0.3, 0.4, 0.2)]), stream("gcd", [(0.2, 0.2, 0.2), (0.4, 0.4, 0.4)])]
    [grid] = stream_grids(read(*paths))
    assert means(line(grid, "promptccd")) == [50, 60, 40, 30, 40, 20, 40, 50, 30]
    assert means(line(grid, "gcd"))[-3:] == [30, 30, 30]
    paper = line(grid, "PromptCCD, DINO ViT-B/16")
    assert paper.rerun and [entry.paper.value for entry in paper.entries[:3] if entry.paper] == [56.5, 76.1, 43.4]


def test_oracle_suite_and_its_masks(fold: Make) -> None:
    mask = {"auroc": 0.4, "iou": 0.2, "error": 0.7, "kept": 0.9, "mean": 0.8, "spread": 0.1}
    paths = [fold(0.6, data="oracle-tiny", unseen="mist", method="patchgen", mask=mask),
             fold(0.9, data="oracle-easy", unseen="mist", method="patchgen", mask=mask),
             fold(0.8, data="oracle-easy", unseen="mist")]  # fmt: skip
    suite, *masks = oracle_grids(read(*paths))
    assert [column.heading for column in suite.columns] == ["easy", "tiny"]
    # the whole unseen domain, ten points below its 80 % in these runs: what the demo shows too
    assert means(line(suite, "patchgen")) == [80, 50] and means(line(suite, "lp-ln")) == [70, None]
    assert "oracle-tiny --unseen mist" in line(suite, "lp-ln").entries[1].command
    assert [grid.name for grid in masks] == ["masks-oracle-easy", "masks-oracle-tiny"]
    assert means(masks[0].lines[0])[:4] == [40, 20, 70, 90]
    mask["untrained_auroc"] = 0.3
    beside = fold(0.9, data="oracle-easy", unseen="mist", method="patchgen", mask=mask, seed=2)
    _, grid = oracle_grids(read(beside))
    assert [column.heading for column in grid.columns[:2]] == ["AUROC", "AUROC, untrained"]
    assert means(grid.lines[0])[:2] == [40, 30]


WEIGHTS = {"3.2": (1e-2, 0.0, 0.0), "3.3": (1e-3, 0.0, 0.0), "3.4": (1e-3, 1.0, 0.0), "3.5": (1e-3, 1.0, 1e-3)}


def settings_of(row: str) -> dict[str, object]:
    methods = {"1.1": "lp-ln", "1.2": "gmdg", "2.1": "ablation-static", "2.2": "ablation-channel",
               "2.3": "ablation-attention", "2.4": "ablation-attention-ms", "3.1": "patchgen-no-losses"}  # fmt: skip
    if row in methods:
        return {"method": methods[row]}
    return {"method": "patchgen", **dict(zip(("lambda_ms", "lambda_conf", "lambda_sim"), WEIGHTS[row], strict=True))}


def test_ablation_rows_and_the_papers_columns(fold: Make) -> None:
    paths = [fold(0.5 + 0.01 * i, data="oracle-easy", unseen="mist", **settings_of(row)) for i, row in enumerate(ROWS)
             if row != "2.2"]  # fmt: skip
    runs = read(*paths)
    rows = runs["config"].map(ablation_row)
    assert list(rows.unique()) == [row for row in ROWS if row != "2.2"]
    [grid] = ablation_grids(runs, "in")
    found = [means(one)[0] for one in grid.lines]
    assert found == [50, 51, 52, None, 54, 55, 56, 57, 58, 59, 60]
    command = f"patchgen sweep configs/small/ablation-small.yaml --out {paths[0].parent}"
    assert grid.lines[3].entries[0].command == command
    papers = [[entry.paper.value for entry in one.entries if entry.paper] for one in grid.lines]
    assert papers[0] == [76.5, 78.7] and papers[-1] == [79.2, 80.9]
    shared = runs[rows.isin(("1.1", "3.1", "3.5"))]
    assert list(ablation_grids(shared, "in")) == []  # no row that only an ablation has


def test_sensitivity(fold: Make) -> None:
    usual = {"data": "oracle-shortcut", "unseen": "mist", "method": "patchgen"}
    paths = [fold(0.60, seed=1, validation=0.5, **usual), fold(0.64, seed=2, validation=0.5, **usual)]
    paths += [fold(0.70, seed=s, validation=0.9, lambda_ms=1e-2, **usual) for s in (1, 2)]
    paths += [fold(0.50, seed=s, validation=0.1, lambda_sim=1e-4, **usual) for s in (1, 2)]
    paths += [fold(0.40, seed=s, validation=0.1, lambda_ms=1e-2, lambda_sim=1e-4, **usual) for s in (1, 2)]
    paths.append(fold(0.99, seed=1, lambda_conf=0.0, **usual))  # another objective: not in this table
    [grid] = sensitivity_grids(read(*paths), "in")
    found = [(one.block, one.label, means(one)[0]) for one in grid.lines]
    assert found == [
        ("sensitivity to lambda_sim", "lambda_ms 0.001, lambda_sim 0.001", 62),
        ("sensitivity to lambda_sim", "lambda_ms 0.001, lambda_sim 0.0001", 50),
        ("sensitivity to lambda_ms", "lambda_ms 0.01, lambda_sim 0.001", 70),
        ("sensitivity to lambda_ms", "lambda_ms 0.001, lambda_sim 0.001", 62),
        ("other combinations", "lambda_ms 0.01, lambda_sim 0.0001", 40),
        ("seeds, default weights", "seed 1", 60),
        ("seeds, default weights", "seed 2", 64),
        ("chosen by source validation alone", "chosen fold by fold", 70),
    ]
    papers = [[entry.paper.value for entry in one.entries if entry.paper] for one in grid.lines]
    assert papers[0] == [66.7, 70.2] and papers[1] == [68.1, 69.6] and papers[4] == []


def test_tables_without_runs_name_recipes_that_exist(fold: Make) -> None:
    grids = make_grids(read(fold(0.8)), "in")
    missing = dict(absent(grids))
    assert len(missing) == len(RECIPES) - 1 and "unseen domains, fold by fold" not in missing
    for _, paper, small in RECIPES.values():
        for recipe in filter(None, (paper, small)):
            assert list((Path(__file__).parents[2] / "configs").glob(f"*/{recipe}.yaml")), recipe

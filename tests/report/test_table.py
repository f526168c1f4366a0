"""The benchmark's tables, with means, standard errors and choices worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from patchgen.common.text import markdown
from patchgen.config import Config
from patchgen.report.table import (
    accuracy_table,
    backbone_line,
    best_by_validation,
    metrics_table,
    recovery_table,
    validation_table,
)
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import Cell, cells_of

DOMAINS = ("art", "photo")


def cell(**changes: Any) -> Cell:
    names = ("lp", "art", 1, "selected", "all")
    usual = Cell(*names, 0.5, 0.4, 10, 0.8, None, None, {}, {}, 1e-3, "source-validation", "abc", "ViT-S")
    return dataclasses.replace(usual, **changes)


def body(table: str) -> list[list[str]]:
    return [[word.strip() for word in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_mean_and_standard_error_over_seeds() -> None:
    cells = [cell(seed=seed, accuracy=accuracy) for seed, accuracy in ((1, 0.70), (2, 0.80), (3, 0.84))]
    cells += [cell(seed=seed, unseen="photo", accuracy=accuracy) for seed, accuracy in ((1, 0.9), (2, 0.9), (3, 0.9))]
    # art: mean 78; deviations -8, 2, 6; variance (64 + 4 + 36) / 2 = 52; error sqrt(52 / 3) = 4.163
    # averages of the seeds 80, 85, 87: mean 84; variance (16 + 1 + 9) / 2 = 13; error sqrt(13 / 3) = 2.082
    [row] = body(accuracy_table(cells, ["lp"], DOMAINS, "selected", "all"))
    assert row == ["lp", "78.0 ± 4.2", "90.0 ± 0.0", "84.0 ± 2.1"]


def test_other_scores_are_means_over_domains_then_seeds() -> None:
    values = {("art", 1): 0.5, ("photo", 1): 0.7, ("art", 2): 0.7, ("photo", 2): 0.9, ("art", 3): 0.1}
    cells = [cell(unseen=d, seed=s, metrics={"auroc": v, "macro_f1": v / 2}) for (d, s), v in values.items()]
    cells += [cell(method="old", unseen=domain) for domain in DOMAINS]  # records of an earlier version
    cells += [cell(unseen="art", part="in", metrics={"auroc": 0.0})]
    table = metrics_table(cells, ["lp", "old"], DOMAINS)
    assert table.splitlines()[0].split() == ["|", "method", "|", "macro", "F1", "|", "AUROC", "|"]
    assert body(table)[0] == ["lp", "35.0 ± 5.0", "70.0 ± 10.0"]  # seed 3 lacks a domain
    assert body(table)[1][0] == "old" and metrics_table(cells[-3:-1], ["old"], DOMAINS) == ""


def test_one_seed_has_no_error() -> None:
    cells = [cell(accuracy=0.25), cell(unseen="photo", accuracy=0.5)]
    assert body(accuracy_table(cells, ["lp"], DOMAINS, "selected", "all")) == [["lp", "25.0", "50.0", "37.5"]]


def test_average_takes_only_seeds_that_have_every_domain() -> None:
    cells = [cell(accuracy=0.5), cell(seed=2, accuracy=0.7), cell(seed=2, unseen="photo", accuracy=0.9)]
    assert body(accuracy_table(cells, ["lp"], DOMAINS, "selected", "all"))[0][2:] == ["90.0", "80.0"]
    lines = accuracy_table(cells[:2], ["lp", "full"], DOMAINS, "selected", "all").splitlines()
    assert [word.strip() for word in lines[2].split("|")[1:-1]] == ["lp", "60.0 ± 10.0", "", ""]
    assert [word.strip() for word in lines[3].split("|")[1:-1]] == ["full", "", "", ""]


def test_a_cell_with_fewer_seeds_than_asked_says_so() -> None:
    cells = [cell(seed=1, accuracy=0.843), cell(seed=1, unseen="photo", accuracy=0.5)]
    cells += [cell(seed=seed, unseen="photo", accuracy=0.5) for seed in (2, 3)]
    cells += [cell(method="full", seed=seed, accuracy=0.5) for seed in (1, 2)]
    lines = accuracy_table(cells, ["lp", "full"], DOMAINS, "selected", "all", seeds=3).splitlines()[2:]
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in lines]
    # (84.3 + 50) / 2 = 67.15: only seed 1 has both domains
    assert rows[0] == ["lp", "84.3 (1 of 3 seeds)", "50.0 ± 0.0", "67.2 (1 of 3 seeds)"]
    assert rows[1] == ["full", "50.0 ± 0.0 (2 of 3 seeds)", "", ""]
    assert "80.0 (1 of 3 seeds)" in validation_table(cells[:1], ["lp"], DOMAINS, seeds=3)
    assert "seeds" not in accuracy_table(cells, ["lp"], ("photo",), "selected", "all", seeds=3)


def test_the_backbone_is_named_and_a_mixture_is_a_warning() -> None:
    cells = [cell(), cell(part="in"), cell(run="def", seed=2)]
    assert backbone_line(cells) == "Backbone: ViT-S"
    mixed = backbone_line([*cells, cell(run="ghi", backbone="ViT-B")])
    assert "DIFFER" in mixed and "ViT-S (2 runs)" in mixed and "ViT-B (1 runs)" in mixed
    assert "no run is finished" in backbone_line([])


def test_checkpoint_part_and_method_are_not_mixed() -> None:
    cells = [
        cell(accuracy=0.1),
        cell(accuracy=0.2, part="in"),
        cell(accuracy=0.3, checkpoint="swad"),
        cell(accuracy=0.4, method="lp-ln"),
    ]
    assert body(accuracy_table(cells, ["lp"], ("art",), "selected", "all")) == [["lp", "10.0", "10.0"]]
    assert body(accuracy_table(cells, ["lp"], ("art",), "selected", "in")) == [["lp", "20.0", "20.0"]]
    assert body(accuracy_table(cells, ["lp"], ("art",), "swad", "all")) == [["lp", "30.0", "30.0"]]


def test_learning_rates_are_chosen_by_validation_fold_by_fold() -> None:
    cells = [
        cell(lr=1e-2, validation=0.7, accuracy=0.99),  # better on the unseen domain, which must not count
        cell(lr=1e-3, validation=0.9, accuracy=0.50),
        cell(lr=1e-4, validation=0.9, accuracy=0.60),  # a tie: the first stays
        cell(lr=1e-2, validation=0.8, unseen="photo"),
        cell(lr=1e-3, validation=0.6, unseen="photo"),
        cell(lr=1e-4, validation=0.1, seed=2),
    ]
    chosen = {(c.unseen, c.seed): c.lr for c in best_by_validation(cells)}
    assert chosen == {("art", 1): 1e-3, ("photo", 1): 1e-2, ("art", 2): 1e-4}


def test_validation_table_shows_the_choice_and_the_mask() -> None:
    cells = [
        cell(method="patchgen", validation=0.75, mask={"mean": 0.456, "spread": 0.123}),
        cell(method="patchgen", validation=0.5, unseen="photo", mask={"mean": 0.6, "spread": 0.2}),
        cell(method="patchgen", validation=0.1, part="in", mask={"mean": 0.9, "spread": 0.9}),
        cell(validation=0.8),
    ]
    lines = validation_table(cells, ["lp", "patchgen"], DOMAINS).splitlines()
    assert [word.strip() for word in lines[2].split("|")[1:-1]] == ["lp", "80.0", "", ""]
    assert body("\n".join(lines))[1] == ["patchgen", "75.0", "50.0", "0.46/0.12, 0.60/0.20"]


def test_markdown_is_aligned() -> None:
    assert markdown(["a", "long"], [["wide one", "1"], ["", "22"]]) == (
        "| a        | long |\n| -------- | ---- |\n| wide one | 1    |\n|          | 22   |"
    )


def scored(accuracy: float) -> dict[str, Any]:
    return {"accuracy": accuracy, "f1": accuracy / 2, "images": 8}


def test_cells_of_a_run_carry_the_validation_of_the_chosen_evaluation(tmp_path: Path) -> None:
    config = Config(data="photos", unseen="art", seed=4, lr=0.01, select="last")
    run = RunFolder.create(tmp_path, config, "abc123")
    for step, accuracies in ((0, (0.9, 0.7)), (5, (0.5, 0.25))):
        validation = {name: scored(value) for name, value in zip(("photo", "sketch"), accuracies, strict=True)}
        run.append({"kind": "evaluation", "step": step, "validation": validation})
    parts = {"in": scored(0.3), "out": scored(0.1), "all": scored(0.2)}
    run.append({"kind": "test", "checkpoint": "selected", "step": 5, **parts, "mask": {"mean": 0.4, "spread": 0.1}})
    run.append({"kind": "test", "checkpoint": "swad", "start_step": 0, "end_step": 5, **parts})
    run.write_json("env.json", {"backbone": {"resolved": "ViT-S"}})
    shared = {"unseen": "art", "seed": 4, "lr": 0.01, "select": "last", "run": "abc123", "images": 8}
    wanted = [
        cell(method="lp@x", checkpoint=checkpoint, part=part, accuracy=accuracy, f1=accuracy / 2, validation=0.375,
             mask=mask, **shared)
        for checkpoint, mask in (("selected", {"mean": 0.4, "spread": 0.1}), ("swad", {}))
        for part, accuracy in (("in", 0.3), ("all", 0.2))
    ]  # fmt: skip
    assert cells_of(run, "lp@x") == wanted


def test_discovered_classes_have_three_numbers() -> None:
    cells = [cell(accuracy=0.5, known=0.75, unknown=0.25), cell(unseen="photo", accuracy=0.3, known=0.5, unknown=0.1)]
    [row] = body(accuracy_table(cells, ["lp"], DOMAINS, "selected", "all"))
    assert row == ["lp", "50.0 / 75.0 / 25.0", "30.0 / 50.0 / 10.0", "40.0 / 62.5 / 17.5"]


def test_recovery_is_shown_where_the_truth_is_known() -> None:
    assert recovery_table([cell(mask={"mean": 0.5, "spread": 0.1})], ["lp"]) == ""
    found = {"auroc": 0.9, "iou": 0.4, "error": 0.25, "kept": 1.0}
    cells = [cell(seed=seed, accuracy=0.8, mask={**found, "auroc": auroc}, given_mask={"true": 0.9, "random": 0.7})
             for seed, auroc in ((1, 0.8), (2, 1.0))]  # fmt: skip
    [row] = body(recovery_table([*cells, cell(method="full")], ["lp", "full"]))
    # 0.8 and 1.0: deviation sqrt(0.02), standard error 0.1
    assert row == ["lp", "0.90 ± 0.10", "0.40 ± 0.00", "0.25 ± 0.00", "1.00 ± 0.00",
                   "80.0 ± 0.0", "90.0 ± 0.0", "70.0 ± 0.0"]  # fmt: skip

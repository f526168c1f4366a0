"""The benchmark's tables, with means, standard errors and choices worked out by hand."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from patchgen.report.compare import cells, comparison, read_scores, verdict
from patchgen.report.table import unequal_terms
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import FACTS, SCORE

DOMAINS = ("art", "photo")
Row = dict[str, Any]


def score(value: float, unseen: str = "art", seed: int = 1, **changes: Any) -> Row:
    usual = {"run": f"{unseen}{seed}", "method": "lp", "data": "d", "seed": seed, "lr": 1e-3, "backbone": "ViT-S",
             "validation": 0.8, "selected_by": "source-validation", "unseen": unseen, "metric": "accuracy",
             "checkpoint": "selected", "part": "all", "value": value, "images": 10}  # fmt: skip
    return usual | changes


def frame(*rows: Row) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*FACTS, *SCORE])


def tables(scores: pd.DataFrame, methods: Sequence[str] = ("lp",), seeds: int = 1) -> dict[str, list[list[str]]]:
    """Title -> heading and rows of every table."""
    blocks = comparison(scores, methods, DOMAINS, seeds, details=True).split("\n\n")
    return {
        title: [[word.strip() for word in line.split("|")[1:-1]] for line in lines.splitlines() if "---" not in line]
        for title, lines in pairwise(blocks) if lines.startswith("|")
    }  # fmt: skip


ACCURACY = "Accuracy, selected checkpoint, on the whole unseen domain (%)"
VALIDATION = "Source validation accuracy (%), by which checkpoints and learning rates are chosen, and masks"
OTHERS = "Other scores (%), selected checkpoint, mean over the whole unseen domains"
RECOVERY = "Masks against the known predictive patches, on the unseen images"


def test_mean_and_standard_error_over_seeds() -> None:
    rows = [score(value, seed=seed) for seed, value in ((1, 0.70), (2, 0.80), (3, 0.84))]
    rows += [score(0.9, "photo", seed) for seed in (1, 2, 3)]
    # art: mean 78; deviations -8, 2, 6; variance (64 + 4 + 36) / 2 = 52; error sqrt(52 / 3) = 4.163
    # averages of the seeds 80, 85, 87: mean 84; variance (16 + 1 + 9) / 2 = 13; error sqrt(13 / 3) = 2.082
    assert tables(frame(*rows))[ACCURACY][1:] == [["lp", "78.0 ± 4.2", "90.0 ± 0.0", "84.0 ± 2.1"]]
    assert "± is the standard error over seeds." in comparison(frame(*rows), ["lp"], DOMAINS)
    one = frame(score(0.25), score(0.5, "photo"))
    assert tables(one)[ACCURACY][1:] == [["lp", "25.0", "50.0", "37.5"]]
    assert "±" not in comparison(one, ["lp"], DOMAINS)


def test_other_scores_are_means_over_domains_then_seeds() -> None:
    values = {("art", 1): 0.5, ("photo", 1): 0.7, ("art", 2): 0.7, ("photo", 2): 0.9, ("art", 3): 0.1}
    rows = [score(v * share, d, s, metric=name) for (d, s), v in values.items()
            for name, share in (("auroc", 1), ("macro_f1", 0.5))]  # fmt: skip
    rows += [score(0.5, domain, method="old") for domain in DOMAINS]  # records of an earlier version
    rows += [score(0.0, part="in", metric="auroc")]
    assert tables(frame(*rows), ["lp", "old"])[OTHERS] == [
        ["method", "macro F1", "AUROC"], ["lp", "35.0 ± 5.0", "70.0 ± 10.0"], ["old", "", ""]  # seed 3 lacks a domain
    ]  # fmt: skip
    assert OTHERS not in tables(frame(score(0.5)))


def test_a_cell_with_missing_seeds_is_marked() -> None:
    rows = [score(0.843), score(0.5, "photo"), score(0.5, "photo", 2), score(0.5, "photo", 3)]
    rows += [score(0.5, seed=seed, method="full") for seed in (1, 2)] + [score(0.8, metric="validation")]
    found = tables(frame(*rows), ["lp", "full"], seeds=3)
    # (84.3 + 50) / 2 = 67.15: only seed 1 has both domains
    assert found[ACCURACY][1:] == [
        ["lp", "84.3 (1 of 3 seeds)", "50.0 ± 0.0", "67.2 (1 of 3 seeds)"],
        ["full", "50.0 ± 0.0 (2 of 3 seeds)", "", ""],
    ]
    assert found[VALIDATION][1][1] == "80.0 (1 of 3 seeds)"


def test_the_backbone_is_named_and_mixed_backbones_are_warned_of() -> None:
    rows = [score(0.5), score(0.5, part="in"), score(0.5, seed=2)]
    assert comparison(frame(*rows), ["lp"], DOMAINS).startswith("Backbone: ViT-S\n")
    mixed = comparison(frame(*rows, score(0.5, seed=3, backbone="ViT-B")), ["lp"], DOMAINS)
    assert "DIFFER" in mixed and "ViT-S (2 runs)" in mixed and "ViT-B (1 runs)" in mixed
    assert "no run is finished" in comparison(frame(), ["lp"], DOMAINS)


def test_checkpoint_part_and_method_are_not_mixed() -> None:
    rows = [score(0.1), score(0.2, part="in"), score(0.3, checkpoint="swad"), score(0.4, method="lp-ln")]
    found = {title: table[1][1] for title, table in tables(frame(*rows)).items() if title.startswith("Accuracy")}
    assert found == {
        ACCURACY: "10.0",
        "Accuracy, selected checkpoint, on 80 % of the unseen domain (%)": "20.0",
        "Accuracy, SWAD, on the whole unseen domain (%)": "30.0",
        "Accuracy, SWAD, on 80 % of the unseen domain (%)": "",
    }  # fmt: skip


def test_validation_table_shows_the_choice_and_the_mask() -> None:
    rows = [score(0.75, method="patchgen", metric="validation"), score(0.8, metric="validation")]
    rows += [score(0.5, "photo", method="patchgen", metric="validation")]
    masks = {("art", "mean"): 0.456, ("art", "spread"): 0.123, ("photo", "mean"): 0.6, ("photo", "spread"): 0.2,
             ("art", "untrained_mean"): 0.5, ("art", "untrained_spread"): 0.01}  # fmt: skip
    rows += [score(v, d, method="patchgen", metric=f"mask: {name}") for (d, name), v in masks.items()]
    assert tables(frame(*rows), ["lp", "patchgen"])[VALIDATION] == [
        ["method", "art", "photo", *(f"{domain} mask {kind}" for domain in DOMAINS
                                     for kind in ("mean", "spread", "untrained mean", "untrained spread"))],
        ["lp", "80.0", *[""] * 9],
        ["patchgen", "75.0", "50.0", "0.46", "0.12", "0.50", "0.01", "0.60", "0.20", "", ""],
    ]  # fmt: skip


def test_discovered_classes_have_three_numbers() -> None:
    values = {"art": (0.5, 0.75, 0.25), "photo": (0.3, 0.5, 0.1)}
    rows = [score(v, domain, metric=metric) for domain, three in values.items()
            for metric, v in zip(("all", "known", "unknown"), three, strict=True)]  # fmt: skip
    assert tables(frame(*rows))[ACCURACY] == [
        ["method", *(f"{place} {kind}" for place in (*DOMAINS, "average") for kind in ("all", "known", "unknown"))],
        ["lp", "50.0", "75.0", "25.0", "30.0", "50.0", "10.0", "40.0", "62.5", "17.5"],
    ]


def test_mask_recovery_is_compared_with_the_untrained_mask() -> None:
    assert RECOVERY not in tables(frame(score(0.5, metric="mask: mean")))
    values = {"iou": 0.4, "error": 0.25, "kept": 1.0, "true mask": 0.9, "random mask": 0.7, "untrained_auroc": 0.6}
    rows = [score(v, seed=seed, metric=f"mask: {name}") for seed in (1, 2) for name, v in values.items()]
    rows += [score(v, seed=seed, metric="mask: auroc") for seed, v in ((1, 0.8), (2, 1.0))]
    rows += [score(0.8, seed=seed) for seed in (1, 2)] + [score(0.1, method="full")]
    # 0.8 and 1.0: deviation sqrt(0.02), standard error 0.1
    assert tables(frame(*rows), ["lp", "full"])[RECOVERY][1:] == [
        ["lp", "0.90 ± 0.10", "0.60 ± 0.00", "0.40 ± 0.00", "0.25 ± 0.00", "1.00 ± 0.00",
         "80.0 ± 0.0", "90.0 ± 0.0", "70.0 ± 0.0"]]  # fmt: skip


def test_the_verdict_compares_with_the_best() -> None:
    rows = [score(v, d, method=m) for m, pair in {"lp": (0.8, 0.8), "full": (0.9, 0.9)}.items()
            for d, v in zip(DOMAINS, pair, strict=True)]  # fmt: skip
    best, against = verdict(frame(*rows), ["lp", "full", "absent"], DOMAINS)
    assert best == "Best on average: full (90.0 %)."
    assert against.startswith("Against lp: 2 of 20 images apart, one seed: no difference shown")
    assert verdict(frame(*rows), ["lp"], DOMAINS) == []


@pytest.mark.parametrize(("labels", "said"), [
    (["lp-ln", "patchgen+entropy"], ["lp-ln+entropy"]), (["lp-ln", "lp-ln+entropy", "patchgen+entropy"], []),
    (["lp-ln", "patchgen, tau 0.5", "patchgen + SWAD"], []), (["lp-ln", "full+miro"], []), (["patchgen+lreg"], []),
])  # fmt: skip
def test_unequal_comparisons_are_noted(labels: list[str], said: list[str]) -> None:
    notes = unequal_terms(labels)
    assert len(notes) == len(said) and all(word in note for word, note in zip(said, notes, strict=True))


def test_cells_are_those_of_the_rate_that_validation_chooses(fold: Callable[..., Path]) -> None:
    rates = ((0.1, 0.3), (0.01, 0.5), (0.001, 0.5))
    paths = [fold(0.3, lr=lr, validation=validation, swad_value=0.4, mask={"mean": 0.4}) for lr, validation in rates]
    found = list(cells(read_scores((RunFolder(path), "lp@x") for path in paths)))
    assert {(cell["method"], cell["run"], cell["lr"], cell["validation"]) for cell in found} == {
        ("lp@x", paths[1].name, 0.01, 0.5)
    }
    assert [(cell["checkpoint"], cell["part"], cell["accuracy"], cell["images"], cell["mask"]) for cell in found] == [
        ("selected", "in", 0.3, 80, {"mean": 0.4}), ("selected", "all", pytest.approx(0.2), 100, {"mean": 0.4}),
        ("swad", "in", 0.4, 80, {}), ("swad", "all", pytest.approx(0.3), 100, {}),
    ]  # fmt: skip
    (paths[0] / "splits.csv").unlink()
    with pytest.raises(ValueError, match="broken"):
        read_scores([(RunFolder(paths[0]), "lp")])

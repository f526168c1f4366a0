"""What a person reads of a run: the progress lines, and what the summary says of labels and scores."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.common.progress import Progress
from patchgen.config import Config
from patchgen.data.table import Table
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import backbone_of
from patchgen.tasks.mdg import make_fold
from patchgen.train.close import progress_line, summarize

SCORE = {"accuracy": 0.5, "f1": 0.25, "images": 20}


def a_table(classes: tuple[str, ...], without_label: int = 0) -> Table:
    label = np.arange(60) % len(classes)
    label[:without_label] = -1
    paths = tuple(f"{i}.png" for i in range(60))
    return Table(Path("photos"), paths, ("a", "b", "c"), classes, np.repeat(np.arange(3), 20), label)


@pytest.fixture
def summary_of(tmp_path: Path) -> Callable[..., str]:
    def summary(table: Table, **score: Any) -> str:
        run = RunFolder.create(tmp_path, Config(data="photos", unseen="c"), "abc")
        run.write_json("env.json", {"backbone": {"resolved": "ViT-S of the hub", "digest": "0"}})
        run.append({"kind": "test", "checkpoint": "selected", "step": 7, "in": score or SCORE, "all": score or SCORE})
        assert backbone_of(run) == "ViT-S of the hub"
        return summarize(run, run.config, make_fold(run.config, table))

    return summary


def test_the_summary_says_which_f1_it_is_and_shows_an_undefined_score_as_a_dash(summary_of: Callable[..., str]) -> None:
    table = a_table(("non-tumour", "tumour"))
    score = {**SCORE, "balanced_accuracy": 0.5, "macro_f1": 0.25, "auroc": None}
    text = summary_of(table, **score)
    assert "- F1: mean over the classes that occur" in text and "- backbone ViT-S of the hub, 224 px" in text
    assert "| 0.5000 | 0.2500 | - | 20 |" in " ".join(text.split()) and "no label" not in text
    text = summary_of(replace(table, benchmark="histopantum"), **score)
    assert "- F1: of class 'tumour', the benchmark's positive one" in text


def test_the_summary_counts_rows_without_a_label(summary_of: Callable[..., str]) -> None:
    text = summary_of(a_table(("cat", "dog"), without_label=3))
    assert "60 images, 3 domains, 2 classes; 3 of them have no label and are neither trained on nor scored" in text


def test_discovered_classes_have_other_scores(summary_of: Callable[..., str]) -> None:
    text = summary_of(a_table(("cat", "dog")), accuracy=0.5, known=0.75, unknown=0.25, images=20)
    [head, rule, row] = [line for line in text.splitlines() if line.startswith("|")]
    assert "| known classes | new classes |" in head and "F1" not in text
    assert "| 0.5000 | 0.5000 | 0.7500 | 0.2500 | 20 |" in " ".join(row.split())
    assert head.count("|") == rule.count("|") == row.count("|")


def test_a_progress_line_is_in_plain_words() -> None:
    record = {
        "step": 50,
        "train": {"main": 0.8124, "L_ms": 0.1, "L_conf": -0.4, "L_sim": 0.2, "L_neg": 0.3, "weak_share": 0.5},
        "validation": {"a": {"accuracy": 0.8, "loss": 0.5}, "b": {"accuracy": 0.9, "loss": 0.7}},
        "mask": {"mean": 0.5204, "spread": 0.0811, "weak": 0.1},
    }
    wanted = "step 50: loss 0.812, validation accuracy 0.850"
    assert progress_line(record) == wanted + ", mask mean 0.52, spread 0.081"
    assert progress_line({**record, "mask": {}}) == wanted


@pytest.mark.parametrize(
    ("done", "quiet", "words"),
    [(0, False, ""), (4, False, "resumed at step 4"), (9, False, "resumed: every step is done"), (4, True, "")],
)
def test_a_resumed_run_says_from_where(done: int, quiet: bool, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("lp, unseen c", 9, done, quiet):
        pass
    said = capsys.readouterr().err
    assert words in said and bool(said) == bool(words)

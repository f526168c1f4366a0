"""Run folders become numbers that know where they come from; what cannot be read is listed, never a crash."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.ccd.settings import StreamConfig
from patchgen.config import Config
from patchgen.report.write import write_report
from patchgen.runs.scores import RULES, best, data_name, label_of, read_runs, recorded_mask

Make = Callable[..., Path]


def test_runs_are_found_at_any_depth_and_once(fold: Make, tmp_path: Path) -> None:
    first, second = fold(0.8), fold(0.7, seed=2)
    deep = tmp_path / "runs" / "a" / "b"
    deep.mkdir(parents=True)
    moved = Path(shutil.move(second, deep / second.name))
    runs, skipped = read_runs([tmp_path, tmp_path / "runs"])
    assert set(runs["path"]) == {first, moved} and not skipped


def test_a_runs_numbers_and_facts(fold: Make) -> None:
    scores, _ = read_runs([fold(0.8, swad_value=0.9, validation=0.95)])
    tested = scores[scores["metric"] == "accuracy"].set_index(["checkpoint", "part"])
    assert dict(zip(tested.index, zip(tested["value"], tested["images"], strict=True), strict=True)) == {
        ("selected", "in"): (0.8, 80), ("selected", "all"): (pytest.approx(0.7), 100),
        ("swad", "in"): (0.9, 80), ("swad", "all"): (pytest.approx(0.8), 100),
    }  # fmt: skip
    facts = scores[["data", "validation", "method", "domains"]].drop_duplicates().to_numpy().tolist()
    assert facts == [["PACS", 0.95, "lp-ln", ("art_painting", "cartoon", "photo", "sketch")]]


def test_recorded_masks_are_paired_with_the_untrained_mask(fold: Make, tmp_path: Path) -> None:
    run = fold(0.8, method="patchgen", mask={"auroc": 0.9, "untrained_auroc": 0.4, "mean": 0.5})
    assert recorded_mask(run) == {"auroc": {"trained": 0.9, "untrained": 0.4}}
    assert recorded_mask(fold(0.8)) == recorded_mask(tmp_path) == {}


def test_skipped_folders_have_a_reason(fold: Make, tmp_path: Path) -> None:
    good = fold(0.8)
    (fold(0.7, seed=2) / "done").unlink()
    (fold(0.7, seed=3) / "config.yaml").write_text("data: [")
    (fold(0.7, seed=4) / "records.jsonl").write_text('{"kind": "test"}\n')
    (fold(0.7, seed=5) / "splits.csv").unlink()
    (fold(0.7, seed=6) / "config.yaml").unlink()
    (fold(0.7, seed=7) / "env.json").write_text("{")
    shutil.copytree(good, tmp_path / "runs" / "zz" / good.name)
    runs, skipped = read_runs([tmp_path])
    assert list(runs["path"].unique()) == [good]
    reasons = sorted(one.reason.split(":")[0] for one in skipped)
    assert reasons == ["broken"] * 5 + ["not finished", f"the same run as {good}"]


def test_folders_without_runs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        read_runs([tmp_path])
    with pytest.raises(FileNotFoundError, match="there is no folder .*absent"):
        read_runs([tmp_path / "absent"])


@pytest.mark.parametrize(("config", "name"), [
    *((Config(data, "u"), name) for data, name in (
       ("/x/PACS", "PACS"), ("x/office_home/", "OfficeHome"), ("terra_incognita", "TerraIncognita"),
       ("oracle-shortcut", "oracle-shortcut"), ("/c/oracle/oracle-tiny-6d61607fa3e6/images", "oracle-tiny"),
       ("rows.csv", "rows"), ("/x/colon4", "colon4"))),
    *((StreamConfig(f"x/{folder}"), "CIFAR-100") for folder in ("cifar-100-binary", "cifar-100-python")),
    (StreamConfig("x/CUB_200_2011", schedule="small/ccd-cub-small.yaml"), "CUB, ccd-cub-small"),
])  # fmt: skip
def test_data_names(config: Config | StreamConfig, name: str) -> None:
    assert data_name(config) == name


def test_labels_name_what_tables_compare() -> None:
    assert label_of(Config("d", "u", method="lp-ln", pool="mean")) == "lp-ln@mean"
    assert label_of(Config("d", "u", tune="full")) == "patchgen@full"
    assert label_of(Config("d", "u", lambda_sim=0.0, tau=0.5)) == "patchgen, no L_sim, tau 0.5"
    assert label_of(Config("d", "u", lambda_ms=1e-2, lr=1.0)) == "patchgen"  # chosen on source validation
    assert label_of(Config("d", "u", method="lp-ln", lambda_ms=0.0)) == "lp-ln"  # it has no such loss
    assert "LOOKS AT THE UNSEEN DOMAIN" in label_of(Config("d", "u", select="oracle"))


def test_a_setup_excludes_compared_and_tuned_settings(fold: Make) -> None:
    usual = fold(0.8)
    same: list[dict[str, Any]] = [{"seed": 2}, {"method": "lp"}, {"lr": 1.0}, {"unseen": "photo"}, {"swad": True}]
    other: list[dict[str, Any]] = [{"steps": 62}, {"image_size": 112}, {"augment": False}, {"holdout": 0.3},
                                   {"seed": 9, "backbone_name": "facebook/dinov2-base"}]  # fmt: skip
    for changes in (*same, *other):
        scores, _ = read_runs([usual, fold(0.8, **changes)])
        assert (scores["setup"].nunique() == 1) == (changes in same), changes


def renamed(path: Path, name: str) -> Path:
    return path.rename(path.with_name(name))


def other_rows(path: Path) -> Path:
    """The same domains, but the files have other names: other data."""
    splits = path / "splits.csv"
    splits.write_text(splits.read_text().replace(".png", ".jpg"))
    return path


def datasets(tmp_path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Name of the run folder -> what its data is called -> where it is."""
    scores, _ = read_runs([tmp_path])
    named, places = (dict(scores[pair].drop_duplicates().to_numpy()) for pair in (["run", "data"], ["data", "place"]))
    return named, places


def test_other_images_under_the_same_name_are_another_data_set(fold: Make, tmp_path: Path) -> None:
    renamed(other_rows(fold(0.6, data="/x/other/PACS")), "far")
    renamed(other_rows(fold(0.6, data="/x/other/PACS", seed=2)), "far2")
    renamed(fold(0.8, data="/x/a/PACS"), "near")
    renamed(fold(0.8, data="/elsewhere/PACS", seed=3), "moved")  # the same rows at another place
    named, places = datasets(tmp_path)
    assert named == {"near": "PACS", "moved": "PACS", "far": "PACS (2)", "far2": "PACS (2)"}
    assert places == {"PACS": "/elsewhere/PACS", "PACS (2)": "/x/other/PACS"}
    assert read_runs([tmp_path])[0]["setup"].nunique() == 1


def test_the_fingerprint_identifies_a_data_set(fold: Make, tmp_path: Path) -> None:
    def at(path: Path, data: str) -> None:
        facts = json.loads((path / "env.json").read_text())
        (path / "env.json").write_text(json.dumps(facts | {"data": data}))

    at(renamed(fold(0.8, data="/x/PACS"), "aaa"), "one")
    at(renamed(fold(0.7, data="/x/PACS", lr=1e-3), "bbb"), "two")  # the images were replaced in place
    at(renamed(fold(0.7, data="/y/PACS", seed=2), "ccc"), "one")  # moved
    at(renamed(fold(0.7, data="/y/PACS"), "ddd"), "one")  # moved, and another name: other weights under the same path
    named, places = datasets(tmp_path)
    assert named == {"aaa": "PACS", "bbb": "PACS (2)", "ccc": "PACS", "ddd": "PACS"}
    assert places == {"PACS": "/x/PACS in the runs aaa, ccc, ddd", "PACS (2)": "/x/PACS in the runs bbb"}


def test_a_single_data_set_is_not_numbered(fold: Make, tmp_path: Path) -> None:
    splits = [fold(0.8, seed=seed, holdout=0.1 * seed) / "splits.csv" for seed in (1, 2)][1]
    splits.write_text(splits.read_text().replace(",in,", ",out,"))  # another split of the same rows
    assert datasets(tmp_path)[1] == {"PACS": ""}


def test_both_data_sets_are_in_the_report(fold: Make, tmp_path: Path) -> None:
    renamed(fold(0.8, data="data/PACS"), "aaa")
    other_rows(renamed(fold(0.6, data="other/PACS"), "bbb"))
    made = write_report([tmp_path / "runs"], tmp_path / "out")
    cells = {grid.title: grid.lines[0].entries[-2].number for grid in made.grids if grid.name.startswith("mdg-pacs")}
    assert {title: number and number.mean for title, number in cells.items()} == {
        "Unseen domains: PACS": pytest.approx(80), "Unseen domains: PACS (2)": pytest.approx(60)
    }  # fmt: skip
    text = (tmp_path / "out" / "report.md").read_text()
    assert "PACS (2) are the images of other/PACS." in text and "PACS are the images of data/PACS." in text
    assert (tmp_path / "out/tables/mdg-pacs_2.csv").is_file() and "(figures/mdg-pacs_2.svg)" in text


# Rules that select a checkpoint


def record(step: int, site_a: float, site_b: float, unseen: float) -> dict[str, Any]:
    """Accuracies as given; F1 turns their order around."""
    both = {name: {"accuracy": value, "f1": 1 - value} for name, value in (("site_a", site_a), ("site_b", site_b))}
    return {"step": step, "validation": both, "oracle": {"accuracy": unseen, "f1": 1 - unseen}}


# steps 10 and 20 have the same mean
RECORDS = [record(0, 0.25, 0.25, 0.75), record(10, 0.75, 0.5, 0.25), record(20, 0.5, 0.75, 0.875),
           record(30, 1.0, 0.0, 0.875)]  # fmt: skip


@pytest.mark.parametrize(("rule", "metric", "step"), [
    ("source-validation", "accuracy", 20), ("source-validation", "f1", 0), ("last", "accuracy", 30),
    ("last", "f1", 30), ("oracle", "accuracy", 30), ("oracle", "f1", 10),
])  # fmt: skip
def test_ties_keep_the_most_recent(rule: str, metric: str, step: int) -> None:
    assert best(RECORDS, rule, metric)["step"] == step
    assert RULES[rule](best(RECORDS, rule, metric), metric) == max(RULES[rule](r, metric) for r in RECORDS)


def test_source_validation_is_an_unweighted_mean_without_the_unseen_domain() -> None:
    one = record(0, 0.2, 0.6, 0.0)
    one["validation"]["site_a"]["images"] = 1000  # a large domain weighs no more than a small one
    assert RULES["source-validation"](one, "accuracy") == pytest.approx(0.4)
    del one["oracle"]
    assert RULES["source-validation"](one, "accuracy") == pytest.approx(0.4)

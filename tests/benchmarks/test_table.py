"""The small subjects of the bench and its table: what is counted, fitted and written; no times."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bookkeeping, flat, peers, probe, rate, table
from benchmarks.__main__ import main
from benchmarks.common import fit_exponent, random_features
from patchgen.discovery import clustering_accuracy

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_made_up_times(power: float) -> None:
    sizes = (8, 32, 128)
    assert fit_exponent(sizes, [0.3 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)


def test_kept_features_are_computed_once() -> None:
    found = probe.measure("tiny", image_size=28, images=30)
    assert found["forwards"] == [30, 30, 0]


def test_plain_mixture_and_match_agree_with_ours() -> None:
    x, centres = random_features(400, 16, 4)
    ours, plain = peers.our_mixture(x, centres), peers.plain_mixture(x, centres)
    np.testing.assert_allclose(ours.means.numpy(), plain.means_, atol=0.05)
    np.testing.assert_allclose(peers.our_kmeans(x, centres).numpy(), peers.plain_kmeans(x, centres), atol=1e-4)
    truth, found = np.array([0, 0, 1, 1, 2]), np.array([1, 1, 0, 2, 2])
    assert peers.plain_match(truth, found) == clustering_accuracy(truth, found, [0]).all == 0.8


def test_rates_count_the_arithmetic_of_each_tuning() -> None:
    found = rate.measure(("tiny",), image_size=28, batch=2, repeats=1)["backbones"]["tiny"]
    flops = {name: each["gflops_per_image"] for name, each in found.items()}
    assert flops["lp"] < flops["lp-ln"] < flops["full"] and flops["lp-ln"] < flops["patchgen"]
    assert found["lp-ln"]["step"] == found["lp-ln"]["floor"] == 1
    assert found["full"]["floor"] == pytest.approx(flops["full"] / flops["lp-ln"])
    assert all(each["share"] > 0 for each in found.values())


def test_rows_say_reached_and_missed() -> None:
    seconds = {"python": 0.1, "import patchgen": 0.2, "patchgen --help": 0.7}
    found = {"seconds": seconds, "reached": {"import patchgen": True,
             "patchgen --help": False}}  # fmt: skip
    rows = table.table({"start": found})
    assert [(row.value, row.target, row.verdict) for row in rows] == [
        ("0.20 s", "< 0.3 s", "reached"), ("0.70 s", "< 0.5 s", "missed"),
    ]  # fmt: skip
    assert table.markdown(rows).splitlines()[-1] == "| start | `patchgen --help` | 0.70 s | < 0.5 s | missed |"


def test_every_subject_has_rows_and_a_small_size() -> None:
    for module in table.SUBJECTS.values():
        assert module.SMALL.keys() <= inspect.signature(module.measure).parameters.keys() and callable(module.lines)


@pytest.mark.slow  # half a minute, and nothing that users run
def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = {("k-means pass", "images"): (lambda n, _: lambda: sum(range(1000 * n)), (1, 4, 16))}
    monkeypatch.setattr(bookkeeping, "COSTS", some)
    monkeypatch.setattr(flat, "peak_bytes", lambda words: 1_000_000 * len(words))
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    assert main(["all", "--small", "--json", "--out", str(tmp_path / "table.md")]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["found"].keys() == set(table.TABLE) and torch.get_num_threads() == threads
    targets = {row["subject"] for row in found["table"] if row["verdict"]}
    always = {"rate", "memory", "input", "fold", "fit", "flat", "probe", "bookkeeping", "start"}
    assert always <= targets <= always | {"predict", "peers"}  # where turns are far apart, nothing is said of it
    assert 0 <= found["machine"]["others"] <= 1 and isinstance(found["machine"]["inconclusive"], bool)
    assert "-- start\npython" in printed.err  # progress
    text = (tmp_path / "table.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(found["table"]) and [p.name for p in tmp_path.glob("*.md*")] == ["table.md"]


@pytest.mark.parametrize(("words", "text"), [
    (["all", "--repeats", "3"], "all takes no further options, got --repeats 3"),
    (["rate", "--small", "--batch", "3"], "--small takes no further options"),
    (["memory", "--patches", "16"], "two or more positive numbers, not [16]"),
    (["modes", "--repeats", "0"], "repeats must be at least 1, not 0"),
    (["bookkeeping", "--scale", "0"], "scale must be above 0"),
    (["bookkeeping", "--over", "pixels"], "over must be some of images, sites, classes, runs, not pixels"),
])  # fmt: skip
def test_refused_words(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert text in printed.err and not printed.out


def test_rows_of_a_subject_are_renewed_in_a_page_and_the_others_stay(tmp_path: Path) -> None:
    old = [table.Row("rate", "a", "1"), table.Row("fold", "b", "2"), table.Row("fold", "c", "3")]
    page = "# Title\n\n" + table.markdown(old) + "\nText.\n"
    new = [table.Row("fold", "b", "9", ">= 2", True), table.Row("start", "d", "4")]
    assert table.put_into(page, new) == "# Title\n\n" + table.markdown([old[0], *new]) + "\nText.\n"
    with pytest.raises(ValueError, match="no table of benchmarks"):
        table.put_into("# Title\n", new)


def test_results_of_a_busy_machine_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(table.markdown([table.Row("bookkeeping", "a", "1")]))
    monkeypatch.setattr(bookkeeping, "COSTS", {("x", "sites"): (lambda n, _: lambda: sum(range(n)), (100, 1000))})
    monkeypatch.setattr("benchmarks.common.Others.verdict", lambda self: "inconclusive: others took 90%")
    assert main(["bookkeeping", "--into", str(page)]) == 1
    assert "left as it is: inconclusive: others took 90%" in capsys.readouterr().err
    assert "| bookkeeping | a | 1 |" in page.read_text()
    monkeypatch.setattr("benchmarks.common.Others.verdict", lambda self: "")
    assert main(["bookkeeping", "--into", str(page)]) == 0 and "x, 100 to 1,000 sites" in page.read_text()

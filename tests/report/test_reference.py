"""The paper's tables: golden numbers typed from the page, and the arithmetic that the printed numbers must obey."""

import csv
from collections import defaultdict
from importlib.resources import files
from statistics import fmean

import pytest

from patchgen.data.benchmarks import BENCHMARKS
from patchgen.report.reference import TABLES, Row, find, read_reference

# name: numbers, of these with an error, numbers in starred rows
SIZES = {
    "mdg": (298, 100, 66), "mdg_causal": (42, 0, 0), "histopantum": (145, 0, 105), "histocolon": (116, 0, 84),
    "ccd": (96, 0, 48), "mdg_gcd": (180, 0, 60), "mdg_gcd_average": (36, 0, 12), "ablation": (144, 0, 0),
    "full_finetuning": (36, 0, 30), "sensitivity": (90, 0, 0),
}  # fmt: skip
LARGE = {"backbone": "ViT-L/14", "pretraining": "DINOv2"}
BASE = {"backbone": "ViT-B/14", "pretraining": "DINOv2"}
MAE = {"backbone": "ViT-B/16", "pretraining": "MAE"}
GOLDEN = [
    ("mdg", {"method": "CLIPCEIL++", "dataset": "TerraIncognita"}, [62.0]),
    ("mdg", {"method": "MIRO", "pretraining": "CLIP", "dataset": "VLCS"}, [82.2]),
    ("mdg", {"method": "Promptstyler"}, [97.2, 82.9, 83.6, 59.4]),  # two dashes are printed
    ("mdg", {"method": "PatchGen", **LARGE, "swad": True}, [97.6, 83.4, 90.6, 70.2, 62.7, 80.9]),
    ("mdg", {"method": "LP+LN", **MAE, "swad": False}, [70.1, 78.5, 53.2, 25.0, 25.2, 50.4]),
    ("mdg", {"method": "PatchGen", **BASE, "dataset": "average"}, [76.9, 79.2]),
    ("mdg_causal", {"method": "CauRDG"}, [89.8, 75.3, 49.8]),
    ("mdg_causal", {"method": "PatchGen", "backbone": "ViT-S/14", "dataset": "OfficeHome"}, [79.1, 82.0]),
    ("histopantum", {"method": "PatchGen", **BASE, "swad": False}, [91.0, 96.2, 89.0, 94.9, 92.8]),
    ("histopantum", {"method": "GESTUR"}, [90.1, 96.6, 87.4, 90.1, 91.0]),
    ("histocolon", {"method": "PatchGen", **LARGE, "domain": "K-19"}, [60.1, 65.2]),
    ("histocolon", {"method": "Baseline+MIRO", "swad": True}, [51.5, 52.4, 57.3, 53.7]),
    ("ccd", {"dataset": "CIFAR-100", "domain": "session 2", "pretraining": "DINOv2"},
     [59.6, 78.6, 55.9, 73.1, 82.8, 71.3]),
    ("ccd", {"row": 7, "pretraining": "DINO", "method": "PromptCCD"}, [56.3, 77.9, 52.1]),
    ("ccd", {"dataset": "CUB", "domain": "average", "metric": "unknown"}, [45.6, 48.7, 61.2, 62.7]),
    ("mdg_gcd", {"method": "Baseline", **BASE, "metric": "all"}, [96.18, 79.26, 85.22, 63.32, 56.44]),
    ("mdg_gcd", {"method": "GMDG", "dataset": "TerraIncognita"}, [40.02, 32.38, 40.07]),
    ("mdg_gcd", {"method": "PatchGen", **MAE, "dataset": "VLCS"}, [54.97, 59.82, 49.11]),
    ("mdg_gcd_average", {"method": "L-Reg", "rerun": True}, [75.35, 75.39, 74.76]),
    ("ablation", {"setting": "task=2.4", "swad": False}, [97.8, 81.9, 86.4, 65.8, 57.7, 77.9]),
    ("ablation", {"setting": "task=3.3", "dataset": "DomainNet"}, [58.4, 62.2]),
    ("ablation", {"metric": "gain", "swad": True}, [0.1, 2.4, 0.9, 2.8, 4.6, 2.2]),
    ("full_finetuning", {"tuning": "full", "dataset": "average"}, [75.7, 77.0, 77.3]),
    ("sensitivity", {"setting": "seed=2 lambda_ms=0.001 lambda_sim=0.001", "swad": True},
     [77.7, 65.0, 70.2, 66.1, 69.8]),
    ("sensitivity", {"row": 6, "domain": "Location100"}, [78.2, 77.2]),
]  # fmt: skip

# Printed averages that are not the rounded mean of the printed parts. All lie within what rounding of the parts allows
# (the paper averaged unrounded numbers): (table, line, swad, data set, pretraining, method, metric) -> printed, mean
FROM_UNROUNDED = {
    ("mdg", 29, False, "average", "", "CORAL", "accuracy"): (64.5, 64.56),
    ("mdg", 32, True, "average", "", "GMDG", "accuracy"): (75.1, 75.16),
    ("histocolon", 5, False, "HISTOCOLON", "DINOv2", "LP", "accuracy"): (52.2, 52.27),
    ("histocolon", 9, False, "HISTOCOLON", "DINOv2", "PatchGen", "accuracy"): (54.4, 54.47),
    ("histocolon", 11, False, "HISTOCOLON", "DINOv2", "LP+LN", "accuracy"): (54.3, 54.37),
    ("ccd", 4, False, "CIFAR-100", "DINOv2", "PromptCCD+PatchGen", "all"): (66.4, 66.33),
    ("ccd", 8, False, "CUB", "DINO", "PromptCCD", "known"): (74.6, 74.67),
    ("ccd", 8, False, "CUB", "DINOv2", "PromptCCD", "unknown"): (61.2, 61.27),
    ("ccd", 8, False, "CUB", "DINOv2", "PromptCCD+PatchGen", "all"): (68.9, 68.83),
    ("ablation", 9, False, "average", "DINOv2", "Baseline+M_p+L_ms", "accuracy"): (78.7, 78.76),
    ("ablation", 12, False, "average", "DINOv2", "PatchGen", "gain"): (2.7, 2.76),  # and its 2.5 should be 2.4
}


@pytest.mark.parametrize("name", TABLES)
def test_sizes(name: str) -> None:
    rows = read_reference(name)
    assert (len(rows), sum(r.error is not None for r in rows), sum(r.rerun for r in rows)) == SIZES[name]
    assert len({(r.row, r.method, r.pretraining, r.swad, r.dataset, r.domain, r.metric) for r in rows}) == len(rows)


@pytest.mark.parametrize(("name", "filters", "values"), GOLDEN)
def test_golden_numbers(name: str, filters: dict[str, str | bool], values: list[float]) -> None:
    assert [row.value for row in find(name, **filters)] == values


def test_a_whole_row() -> None:
    [row] = find("mdg", method="IRM", dataset="OfficeHome")
    source = "arjovsky2019invariant; PatchGen Table 1 (tab:mDG_results)"
    assert row == Row(17, "IRM", "ResNet50", "", "", False, "", "OfficeHome", "average", "accuracy", 64.3, 2.2, False,
                      source)  # fmt: skip
    [row] = find("mdg", method="Baseline+GMDG", swad=True, dataset="PACS")
    assert (row.tuning, row.error, row.rerun) == ("layernorm", None, True)


def averages() -> dict[tuple[str, int, bool, str, str, str, str], tuple[float, float, int]]:
    """Printed average, mean of the printed parts, and how many parts, for every row that prints all of them."""
    found = {}
    for name in TABLES:
        rows = read_reference(name)
        across = "domain" if name in ("histopantum", "histocolon", "ccd", "sensitivity") else "dataset"
        groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
        for r in rows:  # CCD prints a session a line, the others all parts in one
            line = r.dataset if name == "ccd" else r.row
            groups[line, r.swad, r.pretraining, r.method, r.metric].append(r)
        for group in groups.values():
            parts = [r.value for r in group if getattr(r, across) != "average"]
            for r in group:
                if getattr(r, across) == "average" and parts:
                    key = (name, r.row, r.swad, r.dataset, r.pretraining, r.method, r.metric)
                    found[key] = (r.value, fmean(parts), len(parts))
    return found


def test_averages_are_the_means_of_their_parts() -> None:
    found = averages()
    by_table = [sum(key[0] == name for key in found) for name in TABLES]
    assert by_table == [49, 6, 29, 29, 24, 0, 0, 24, 6, 18]
    assert {parts for *_, parts in found.values()} == {3, 4, 5}
    # one decimal: 0.05 for the rounding of the average, another 0.05 at most for that of its parts
    assert all(abs(printed - mean) <= 0.1 for printed, mean, _ in found.values())
    odd = {key: (printed, round(mean, 2)) for key, (printed, mean, _) in found.items() if abs(printed - mean) > 0.0501}
    assert odd == FROM_UNROUNDED


def test_table_7_is_the_mean_of_table_6() -> None:
    for row in read_reference("mdg_gcd_average"):
        parts = find("mdg_gcd", row=row.row, metric=row.metric)
        assert [(p.method, p.backbone, p.pretraining, p.rerun) for p in parts] == [
            (row.method, row.backbone, row.pretraining, row.rerun)
        ] * 5
        assert row.value == pytest.approx(fmean(p.value for p in parts), abs=0.0051)


def test_gains_are_differences_with_one_known_exception() -> None:
    wrong = {}
    for gain in find("ablation", metric="gain"):
        same = {"swad": gain.swad, "dataset": gain.dataset}
        [full] = find("ablation", setting="task=3.5", **same)
        [base] = find("ablation", setting="task=1.1", **same)
        if abs(full.value - base.value - gain.value) > 1e-6:
            wrong[gain.dataset, gain.swad] = (gain.value, round(full.value - base.value, 1))
    assert wrong == {("TerraIncognita", False): (2.5, 2.4)}


def test_tables_that_repeat_each_other() -> None:
    def values(name: str, **filters: str | int | bool) -> list[float]:
        return [row.value for row in find(name, **filters)]

    for swad in (False, True):
        for method in ("LP+LN", "Baseline+GMDG"):
            assert values("ablation", method=method, swad=swad) == values("mdg", method=method, swad=swad, **LARGE)
        assert values("ablation", setting="task=3.5", swad=swad) == values("mdg", method="PatchGen", swad=swad, **LARGE)
        assert values("full_finetuning", method="LP+LN", swad=swad) == values("mdg", method="LP+LN", swad=swad, **BASE)
    assert values("full_finetuning", method="PatchGen") == values("mdg_causal", row=8)
    assert values("sensitivity", row=2) == values("sensitivity", row=5) == values("sensitivity", row=8)
    # the two pairs that the notes call possible copies
    assert values("mdg", method="LP", **LARGE) == values("mdg", method="LP+LN", swad=False, **LARGE)
    copies = [values("histocolon", row=row, swad=True) for row in (8, 11)]
    assert copies[0] == copies[1]


def test_ccd_all_is_the_weighted_mean_of_known_and_unknown() -> None:
    """A = w K + (1 - w) U, w the share of stage-0 classes among a session's images under PromptCCD's split."""
    share = {"CIFAR-100": (2450 / 5950, 1050 / 6550, 1050 / 7050), "CUB": (280 / 700, 140 / 800, 140 / 860)}
    for dataset, weights in share.items():
        for session, w in enumerate(weights, 1):
            rows = find("ccd", dataset=dataset, domain=f"session {session}")
            for a, k, u in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
                assert (a.metric, k.metric, u.metric) == ("all", "known", "unknown")
                assert a.value == pytest.approx(w * k.value + (1 - w) * u.value, abs=0.07)


def test_data_sets_and_domains_are_the_registered_ones() -> None:
    for name in TABLES:
        for row in read_reference(name):
            if name == "ccd" or row.dataset == "average":
                continue
            [benchmark] = [b for b in BENCHMARKS.values() if b.is_called(row.dataset)]
            assert row.domain == "average" or benchmark.domain_of(row.domain) is not None


def test_every_file_is_a_table() -> None:
    folder = files("patchgen.report").joinpath("reference")
    assert {path.name for path in folder.iterdir()} == {f"{name}.csv" for name in TABLES} | {"tables.yaml"}
    for name, table in TABLES.items():
        lines = list(csv.DictReader(folder.joinpath(f"{name}.csv").read_text(encoding="utf-8").splitlines()))
        assert {line[column] for line in lines for column in ("swad", "rerun")} <= {"yes", "no"}
        assert all(f"PatchGen Table {table.number} (tab:" in line["source"] for line in lines)
    assert [table.number for table in TABLES.values()] == list(range(1, 11))


@pytest.mark.parametrize(("name", "filters", "message"), [
    ("mdg_gdc", {}, r"'mdg_gdc'; did you mean 'mdg_gcd'\? \(known: mdg, "),
    ("mdg", {"method": "PatchGenn"}, r"no method in 'mdg' is 'PatchGenn'; did you mean 'PatchGen'\?"),
])  # fmt: skip
def test_unknown_names_get_a_suggestion(name: str, filters: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(name, **filters)
    assert find("mdg", method="Promptstyler", dataset="TerraIncognita") == []  # a dash in the paper

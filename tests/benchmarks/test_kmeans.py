"""The k-means bench: both versions are right, the comparison by hand, the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import kmeans
from benchmarks.__main__ import main
from patchgen.diagnose.cost import Times


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_broadcast_version_equals_the_definition(rows: int) -> None:
    x, centres = kmeans.random_features(40, 8, 5)
    expected = torch.cdist(x.double(), centres.double()).argmin(1)
    assert torch.equal(kmeans.nearest_by_broadcast(x, centres, rows), expected)


def test_measures_both_in_turn_and_they_agree(capsys: pytest.CaptureFixture[str]) -> None:
    found = kmeans.measure(points=300, dim=16, clusters=5, repeats=2, chunk_mb=1)
    assert json.loads(json.dumps(found)) == found
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["matmul", "broadcast"] * 2
    assert all(len(m["seconds"]) == 2 and min(m["seconds"]) > 0 for m in found["passes"].values())
    assert found["agreement"] == {"same": 300, "ties": 0, "wrong": 0}


def test_the_chunk_fits_its_memory() -> None:
    found = kmeans.measure(points=3000, dim=16, clusters=5, repeats=1, chunk_mb=1)
    assert found["chunk_rows"] == 1_000_000 // (2 * 4 * 5 * 16)  # differences and squares in float32


def test_features_are_unit_vectors_around_all_centres() -> None:
    x, centres = kmeans.random_features(200, 64, 4)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(200, device=x.device))
    assert kmeans.nearest_by_broadcast(x, centres, 50).bincount(minlength=4).min() > 20


def test_compare_by_hand() -> None:
    found = kmeans.compare(Times([60.0, 90.0, 80.0], [8.0, 8.0, 8.0]), Times([1.0, 2.0, 4.0], [2.0, 1.0, 4.0]))
    assert found["of_medians"] == 40 and found["of_fastest"] == 60 and found["of_cpu_medians"] == 4
    assert (found["lowest"], found["highest"]) == (20, 60) and found["reached"]
    assert not kmeans.compare(Times([29.0], [1.0]), Times([1.0], [1.0]))["reached"]


def test_agreement_tells_ties_from_mistakes() -> None:
    x = torch.tensor([[0.0], [1.0], [0.0]])
    centres = torch.tensor([[-1.0], [1.0]])
    found = kmeans.agreement(x, centres, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))
    assert found == {"same": 1, "ties": 1, "wrong": 1}  # 0 lies between both; 1 does not


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kmeans", "--points", "50", "--dim", "4", "--clusters", "3", "--repeats", "1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "50 x 4 points, 3 centres" in text and "50 of 50, 0 ties, 0 wrong" in text and "broadcast (" in text
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["found"]["kmeans"]
    assert (found["points"], found["dim"], found["clusters"], found["repeats"]) == (50, 4, 3, 1)


@pytest.mark.parametrize("option", ["points", "dim", "clusters", "repeats", "chunk-mb"])
def test_command_refuses(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kmeans", f"--{option}", "0"]) == 2
    assert f"{option.replace('-', '_')} must be at least 1, not 0" in capsys.readouterr().err

"""The table of the full recipes in docs/study/report.md is what a dry run counts."""

from pathlib import Path

import pytest
from PIL import Image

from patchgen.data.benchmarks import BENCHMARKS
from patchgen.sweep.plan import plan, protocols
from patchgen.sweep.recipe import read_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every benchmark of the paper, with one small image per class."""
    root = tmp_path_factory.mktemp("benchmarks")
    for entry in BENCHMARKS.values():
        for domain in entry.domains:
            for label in (entry.classes or ("aircraft", "zebra"))[:7]:
                folder = root / entry.folder / domain / label
                folder.mkdir(parents=True)
                Image.new("RGB", (4, 4)).save(folder / "0.png")
    return root


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "study" / "report.md").read_text().partition("### What the full recipes run")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ") and ".yaml`" in line]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_the_recipes() -> None:
    assert {name for _, name, *_ in rows()} >= {"mdg.yaml", "histology.yaml", "mdg-gcd.yaml", "ablation.yaml"}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1])
def test_a_recipe_runs_what_the_page_says(
    row: list[str], benchmarks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATCHGEN_DATA", str(benchmarks))
    budgets = protocols(plan([read_recipe(ROOT / "configs" / "paper" / row[1])], tmp_path))
    runs: dict[str, int] = {}
    for data, count, *_ in budgets:
        runs[data] = runs.get(data, 0) + int(count)
    assert ", ".join(f"{data} {count}" for data, count in runs.items()) == row[2]
    assert ", ".join(sorted({budget[4].removesuffix(" a domain") for budget in budgets})) == row[3]
    assert ", ".join(sorted({budget[5] for budget in budgets})) == row[4]
    if "evaluated every" not in row[5]:
        for data, _, steps, every, *_ in budgets:
            entry = BENCHMARKS[data.lower()]
            assert (int(steps), int(every)) == (entry.steps, entry.checkpoint_every), data

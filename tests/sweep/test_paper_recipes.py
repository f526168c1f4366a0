"""The table of the full recipes in docs/study/report.md is what a dry run counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image

from patchgen.config import Config
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.methods import make_method
from patchgen.sweep.plan import plan, protocols, width
from patchgen.sweep.recipe import expand, read_recipe

ROOT = Path(__file__).parents[2]
SLIDES = 35_000  # tiles of an organ of HISTOPANTUM, of 140,569 in all, where the count is not confirmed


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


def gpu_hours(config: Config, tune: str, images: Mapping[str, int]) -> float:
    """Training steps, evaluations on source validation and the test at 50 TFLOP/s: a 24 GB GPU in bf16."""
    sources = [count for domain, count in images.items() if domain != config.unseen]
    passes = {"head": 1, "layernorm": 2}.get(tune, 3)  # forward passes that a training image costs
    passes += any(name in config.method for name in ("miro", "gmdg"))  # a frozen copy as well
    trained = config.steps * config.batch_per_domain * len(sources) * passes
    scored = (config.steps // config.eval_every + 2) * config.holdout * sum(sources) + images[config.unseen]
    forward = 11e9 * width(config) * (config.image_size / 224) ** 2  # 11 GFLOP: a ViT-S/14 at 224 px
    trainings = len(sources) if config.select == "leave-one-out" else 1  # each of the others has a source less
    return trainings * forward * (trained + scored) / 50e12 / 3600


HOURS = sorted(
    path.name for path in (ROOT / "configs" / "paper").glob("*.yaml") if re.search(r"\d GPU hours", path.read_text())
)


@pytest.mark.parametrize("name", HOURS)
def test_the_hours_of_a_header_are_its_operations_over_a_stated_rate(
    name: str, benchmarks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGEN_DATA", str(benchmarks))
    recipe, hours, folders = read_recipe(ROOT / "configs" / "paper" / name), 0.0, {}
    for entry in BENCHMARKS.values():
        counts = next(iter(entry.counts.values()))
        folders[entry.folder] = {domain: counts.get(domain, SLIDES) for domain in entry.domains}
    for planned in expand(recipe, lambda settings: list(folders[Path(settings["data"]).name])):
        config = planned.config
        assert isinstance(config, Config)
        method = make_method(config)
        hours += gpu_hours(config, method.chosen_tune, folders[Path(config.data).name])
    stated = re.search(r"about (\d+) GPU hours", " ".join(recipe.path.read_text().split("\n# ")))
    assert stated and float(stated[1]) == pytest.approx(hours, rel=0.02), (stated and stated[1], hours)

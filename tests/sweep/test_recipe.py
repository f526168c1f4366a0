"""Recipes: every combination, in order, against lists written out by hand; and what is refused, in one sentence."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.ccd.settings import SMALL, StreamConfig
from patchgen.config import Config
from patchgen.methods.presets import preset_settings
from patchgen.sweep.recipe import PlannedRun, expand, find_recipe, read_recipe

Write = Callable[[str], Path]
DOMAINS = {"a": ("x", "y"), "b": ("z",)}


def runs(path: Path) -> list[PlannedRun]:
    return list(expand(read_recipe(path), lambda settings: DOMAINS[settings["data"]]))


ROWS = """rows:
  - {name: "1.1", method: lp-ln}
  - {name: "3.4", method: patchgen, lambda_sim: 0.0, lambda_ms: 0.25}
"""
SUMS = "rows:\n  - {name: A, method: lp-ln@mean@full}\n  - {name: B, method: miro, hparams.miro: 0.5}\n"
OWN: dict[str, Any] = {"lambda_ms": 0.25, "lambda_sim": 0.0}


@pytest.mark.parametrize(("text", "expected"), [
    ("data: a\nsteps: 7\ngrid:\n  unseen: [x, y]\n  method: [lp, patchgen]\n  seed: [1, 2]\n",
     [Config("a", unseen, method=method, seed=seed, steps=7)
      for unseen in ("x", "y") for method in ("lp", "patchgen") for seed in (1, 2)]),
    ("data: a\nunseen: x\nlambda_ms: 0.5\ngrid: {seed: [1, 2]}\n" + ROWS,
     [*(Config("a", "x", method="lp-ln", lambda_ms=0.5, seed=seed) for seed in (1, 2)),
      *(Config("a", "x", method="patchgen", seed=seed, **OWN) for seed in (1, 2))]),
    ("unseen: all\ngrid: {data: [a, b]}", [Config("a", "x"), Config("a", "y"), Config("b", "z")]),
    ("grid: {data: [a, b], unseen: all}", [Config("a", "x"), Config("a", "y"), Config("b", "z")]),
    ("preset: small\ndata: a\nunseen: x\nsteps: 9\ngrid: {method: [lp-ln, patchgen]}",
     [Config("a", "x", method=name, **{**preset_settings("small", name), "steps": 9})
      for name in ("lp-ln", "patchgen")]),
    ("data: a\nunseen: x\n" + SUMS,
     [Config("a", "x", method="lp-ln", pool="mean", tune="full"),
      Config("a", "x", method="miro", hparams={"miro": 0.5})]),
])  # fmt: skip
def test_every_combination_in_the_order_of_the_file(text: str, expected: list[Config], write_recipe: Write) -> None:
    assert [run.config for run in runs(write_recipe(text))] == expected


def test_labels_are_the_row_and_the_grid_values(write_recipe: Write) -> None:
    [run] = runs(write_recipe("data: a\ngrid: {unseen: [x], method: [lp], seed: [1]}"))
    assert (run.row, run.label) == ("", "unseen x, method lp, seed 1")
    found = runs(write_recipe("data: a\nunseen: x\ngrid: {seed: [1, 2]}\n" + ROWS))
    assert [run.label for run in found] == ["1.1, seed 1", "1.1, seed 2", "3.4, seed 1", "3.4, seed 2"]
    assert [run.row for run in found] == ["1.1", "1.1", "3.4", "3.4"]


def test_paper_preset_takes_published_settings_and_ours_win(tmp_path: Path, write_recipe: Write) -> None:
    text = f"preset: paper\ndata: {tmp_path}\nbenchmark: pacs\nunseen: x\nbackbone: resnet50\nmethod: gmdg\n"
    [plain] = [run.config for run in runs(write_recipe(text + "grid: {seed: [1]}"))]
    [other] = [run.config for run in runs(write_recipe(text + "grid: {hparams.shift: [0.7]}"))]
    assert isinstance(plain, Config) and isinstance(other, Config)
    assert (plain.lr, plain.normalization) == (5e-5, "imagenet")
    assert plain.hparams == {"miro": 0.01, "shift": 0.01, "domain": 0.01, "lr_mult": 25.0}  # the release's, for PACS
    assert other.hparams == plain.hparams | {"shift": 0.7}


def test_a_stream_has_its_own_settings_and_finds_its_schedule_beside_the_recipe(write_recipe: Write) -> None:
    path = write_recipe("task: ccd\npreset: small\ndata: birds\nschedule: s.yaml\ngrid: {method: [gcd, simgcd]}")
    (path.parent / "s.yaml").write_text("")
    found = [run.config for run in runs(path)]
    assert found[1] == StreamConfig("birds", schedule=str(path.parent / "s.yaml"), method="simgcd", **SMALL)


def test_a_random_search_draws_from_the_ranges_alike_for_every_domain(write_recipe: Write) -> None:
    text = "data: a\nunseen: all\nrandom: {lr: [1.0e-5, 1.0e-3, log], hparams.miro: [0, 2]}\nmethod: miro\ntrials: "
    found = [run.config for run in runs(write_recipe(text + "40"))]
    assert [(c.unseen) for c in found if isinstance(c, Config)] == ["x", "y"] * 40
    draws = [(c.lr, c.hparams["miro"]) for c in found if isinstance(c, Config)]
    assert draws[::2] == draws[1::2] and len(set(draws)) == 40
    rates, weights = np.array(draws[::2]).T
    assert ((rates >= 1e-5) & (rates <= 1e-3)).all() and ((weights >= 0) & (weights <= 2)).all()
    assert np.log10(rates).mean() == pytest.approx(-4, abs=0.3) and weights.mean() == pytest.approx(1, abs=0.3)
    first = np.random.default_rng([1, 0]).random(2)  # seed 1, trial 0
    assert draws[0] == pytest.approx((1e-5 * 100 ** first[0], 2 * first[1]), rel=1e-2)
    fewer = [run.config for run in runs(write_recipe(text + "3"))]
    assert fewer == found[:6] != [run.config for run in runs(write_recipe(text + "3\nseed: 7"))]


def test_environment_variables_are_expanded(write_recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_recipe("unseen: x\nbackbone: ${SOME_FOLDER}/w.safetensors\ngrid: {data: [$SOME_FOLDER/PACS]}")
    monkeypatch.setenv("SOME_FOLDER", "/far")
    [run] = runs(path)
    assert run.config == Config("/far/PACS", "x", backbone="/far/w.safetensors")
    monkeypatch.delenv("SOME_FOLDER")
    with pytest.raises(ValueError, match="needs the variable SOME_FOLDER, which is not set: export SOME_FOLDER="):
        runs(path)


@pytest.mark.parametrize(("text", "message"), [
    ("data: a\nunseen: x", "neither `grid` nor `rows` nor `random`.*--config"),
    ("data: a\ngird: {}\nrows: [{name: A}]", "unknown setting 'gird'; did you mean 'grid'"),
    ("data: a\ngrid: {sede: [1]}", "grid: unknown setting 'sede'; did you mean 'seed'"),
    ("data: a\ngrid: {seed: 1}", r"grid: seed must be a list with a value in it, such as \[1\]"),
    ("data: a\ngrid: [1]", "`grid` must hold"),
    ("data: a\nrows: [{method: lp}]", "each with a name"),
    ("data: a\nrows: [{name: 1.1}]", "name must be text .in quotes. .*, not 1.1"),
    ("data: a\nrows: [{name: A}, {name: A}]", "that no other row has, not 'A'"),
    ("data: a\nrows: [{name: A, mehtod: lp}]", "row 'A': unknown setting 'mehtod'; did you mean 'method'"),
    ("data: a\ngrid: {seed: [1]}\nrows: [{name: A, seed: 2}]", "seed appears in row 'A' and in the grid"),
    ("preset: smal\ngrid: {seed: [1]}", "preset must be one of paper, small, quick, not 'smal'; did you mean"),
    ("data: a\ngrid: {seed: [1]}", "unseen are required"),
    ("data: a\nunseen: x\ngrid: {steps: [many]}", "steps must be a whole number, not 'many'"),
    ("data: a\nunseen: x\nrows: [{name: A, lr: 1e-3}]", "row 'A': lr must be a finite number, not '1e-3'"),
    ("data: a\nunseen: x\nepochs: 3\ngrid: {seed: [1]}", "unknown setting 'epochs'"),  # of task ccd only
    ("random: {lr: [1.0e-5, 1.0e-3]}", "random search needs both"),
    ("random: {lr: [1.0e-3, 1.0e-5]}\ntrials: 2", r"lr must be \[low, high\] or"),
    ("random: {steps: [5, 10]}\ntrials: 2", "'steps' is none of lr, "),
    ("lr: 0.1\nrandom: {lr: [1.0e-5, 1.0e-3]}\ntrials: 2", "lr is drawn at random and also given"),
    ("data: a\nunseen: x\ngrid: {method: [lp@men]}", "'men' is neither a pool nor a tuning mode"),
])  # fmt: skip
def test_wrong_recipes_are_one_sentence(text: str, message: str, write_recipe: Write) -> None:
    with pytest.raises(ValueError, match=message) as error:
        runs(write_recipe(text))
    assert "recipe.yaml" in str(error.value)


def test_the_example_of_the_guide_is_a_recipe(write_recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "study" / "sweep.md").read_text()
    monkeypatch.setenv("PATCHGEN_DATA", "/far")
    domains: dict[str, Any] = {"oracle-easy": ["amber", "mist"], "/far/PACS": ["photo"]}
    recipe = read_recipe(write_recipe(guide.split("```yaml\n")[1].split("```")[0]))
    found = list(expand(recipe, lambda settings: domains[settings["data"]]))
    assert len(found) == 4 * 3 * 3 and {run.row for run in found} == {"1.1", "3.4", "mean token", "MIRO"}


# The recipes of the repository

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))


def header(recipe: Path) -> str:
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def test_names_are_unique_over_the_folders() -> None:
    assert len({path.name for path in RECIPES}) == len(RECIPES)
    assert {path.parent.name for path in RECIPES} == {"paper", "small"}
    assert find_recipe("mdg") == find_recipe("configs/mdg.yaml") == ROOT / "configs" / "paper" / "mdg.yaml"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_header_has_the_command_and_what_to_compare_with(recipe: Path) -> None:
    text = header(recipe)
    assert f"configs/{recipe.parent.name}/{recipe.name}" in text
    pages = re.findall(r"docs/(?!results/README)[\w/-]+\.md", text)
    assert pages or re.search(r"The paper|No number", text)
    assert [page for page in pages if not (ROOT / page).is_file()] == []

"""Published hyper-parameters: figures from the releases, in a form that the settings accept."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.methods import METHODS, make_method
from patchgen.methods.presets import HOST_PRESETS, host_settings, preset_settings, published
from patchgen.model.backbone import BACKBONES


def three(lr: float, weight_decay: float, dropout: float, **hparams: float) -> dict[str, Any]:
    return {"lr": lr, "weight_decay": weight_decay, "dropout": dropout, "hparams": hparams}


CLIPOOD = {
    "lr": 1e-5, "weight_decay": 0.1, "batch_per_domain": 12, "steps": 5000, "eval_every": 500,
    "augmentation": "crop-flip", "select": "last", "normalization": "backbone", "hparams": {"margin": 0.3, "beta": 0.5},
}  # fmt: skip
GMDG = {"miro": 0.1, "shift": 0.001, "domain": 0.1, "lr_mult": 20.0}


@pytest.mark.parametrize(("asked", "wanted"), [
    (("miro", "vlcs", "resnet50"), three(1e-5, 1e-6, 0.5, miro=0.01)),
    (("miro", "domainnet", "clip-b16"), three(5e-5, 0.0, 0.0, miro=1.0) | {"batch_per_domain": 24}),
    (("clipood", "officehome", "clip-b16"), CLIPOOD),
    (("gmdg", "officehome", "resnet50"), three(3e-5, 1e-6, 0.1, **GMDG)),
])  # fmt: skip
def test_figures(asked: tuple[str, str, str], wanted: dict[str, object]) -> None:
    assert host_settings(*asked) == wanted


def test_swad_and_the_task_have_their_own() -> None:
    def weights(**more: object) -> list[float]:
        found = host_settings("gmdg", "terraincognita", **more)["hparams"]  # type: ignore[arg-type]
        return [found[name] for name in ("miro", "shift", "domain", "lr_mult")]

    assert weights(backbone_kind="resnet50") == [0.1, 0.1, 0.2, 12.5]
    assert weights(backbone_kind="resnet50", swad=True) == [0.1, 0.001, 0.01, 10]
    assert weights(backbone_kind="regnety-16gf", swad=True) == [0.01, 0.01, 0.01, 2.5]  # the same with and without
    assert weights(backbone_kind="regnety-16gf", task="mdg_gcd", swad=True) == [0.01, 0.01, 0.01, 5]
    assert host_settings("pim-lreg", "pacs", "regnety-16gf", task="mdg_gcd")["hparams"]["lr_mult"] == 0.25
    assert host_settings("miro", "vlcs", "resnet50", swad=True) == three(5e-5, 0.0, 0.0, miro=0.01)


@pytest.mark.parametrize(("asked", "task", "wanted"), [
    (("miro", "pacs", "dinov2-small"), "mdg", {"miro": 1.0}),  # a ViT: CLIP's
    (("lreg", "vlcs", "dinov2-base"), "mdg_gcd", {"lreg": 0.5}),
    (("lreg", "vlcs", "mae-b16"), "mdg", {"lreg": 0.5}),  # published with unknown classes alone
    (("miro", "domainnet", "dinov2-base"), "mdg_gcd", {"miro": 0.1, "lr_mult": 1.0}),
])  # fmt: skip
def test_other_backbones_get_the_methods_weights_and_nothing_that_rows_share(
    asked: tuple[str, str, str], task: str, wanted: dict[str, float]
) -> None:
    assert host_settings(*asked, task=task) == {"hparams": wanted}


@pytest.mark.parametrize("asked", [
    ("miro", "histocolon", "dinov2-base"), ("miro", "histocolon", "resnet50"), ("patchgen", "pacs", "resnet50"),
    ("miro", None, "resnet50"), ("gestur", "pacs", "regnety-16gf"),
])  # fmt: skip
def test_what_is_not_published_is_empty(asked: tuple[str, str | None, str]) -> None:
    assert host_settings(*asked) == {}


def test_an_answer_is_the_callers_own() -> None:
    host_settings("miro", "pacs", "resnet50")["hparams"]["miro"] = 7
    assert host_settings("miro", "pacs", "resnet50")["hparams"] == {"miro": 0.01}


def test_every_entry_is_accepted_as_settings() -> None:
    for (method, benchmark, variant), settings in HOST_PRESETS.items():
        assert method in METHODS and benchmark in BENCHMARKS and variant.split()[0] in BACKBONES
        make_method(Config(data="photos", unseen="site_c", method=method, **settings))


def test_published_values_are_found_by_the_folders_name(tmp_path: Path) -> None:
    for domain in ("Caltech101", "LabelMe"):
        (tmp_path / "VLCS" / domain).mkdir(parents=True)
    found = published(str(tmp_path / "VLCS"), None, "patchgen+miro", "resnet50")
    assert found == host_settings("miro", "vlcs", "resnet50") != {}
    assert published(str(tmp_path), None, "patchgen+miro", "resnet50") == {}
    assert published(str(tmp_path), "vlcs", "miro", "resnet50") == found
    assert published(str(tmp_path / "VLCS"), None, "patchgen", "resnet50") == {}


def named_folder(root: Path, benchmark: str) -> Path:
    """A folder that is recognised as a benchmark, with an image of one class a domain."""
    entry = BENCHMARKS[benchmark]
    for domain in entry.domains:
        (root / entry.folder / domain / (entry.classes or ("aircraft",))[0]).mkdir(parents=True)
    return root / entry.folder


PROTOCOL = {"pacs": (5001, 100), "vlcs": (5001, 50), "officehome": (5001, 100), "terraincognita": (5001, 100),
            "domainnet": (15001, 500), "histopantum": (5001, 200), "histocolon": (5001, 200)}  # fmt: skip


@pytest.mark.parametrize("benchmark", PROTOCOL)
def test_the_preset_paper_has_each_benchmarks_protocol(benchmark: str, tmp_path: Path) -> None:
    folder = named_folder(tmp_path, benchmark)
    steps, every = PROTOCOL[benchmark]
    wanted = {"normalization": "imagenet", "steps": steps, "eval_every": every}
    assert preset_settings("paper", data=str(folder)) == wanted
    assert preset_settings("paper", "patchgen", str(tmp_path), benchmark) == wanted  # by its name, wherever it lies
    assert preset_settings("paper", data=str(tmp_path)) == {"normalization": "imagenet"}
    assert "steps" not in preset_settings("", data=str(folder))
    assert preset_settings("small", data=str(folder)) == preset_settings("small")


def test_train_and_compare_follow_it(tmp_path: Path) -> None:
    from patchgen.commands import compare, train
    from patchgen.commands.settings import parse_settings

    words = [str(named_folder(tmp_path, "vlcs")), "--preset", "paper", "--backbone", "tiny"]
    given: Any = train.parsed([*words, "--unseen", "x"])[1]
    assert (given.steps, given.eval_every) == PROTOCOL["vlcs"]
    assert train.parsed([*words, "--unseen", "x", "--steps", "7"])[1] == dataclasses.replace(given, steps=7)
    plain: Any = train.parsed([str(tmp_path), "--preset", "paper", "--unseen", "x"])[1]
    assert (plain.steps, plain.eval_every) == (Config.steps, Config.eval_every)
    more = parse_settings(compare.CompareOptions, [*words, "--methods", "lp-ln"])
    runs: list[Any] = list(compare.planned_runs(*more, ("a", "b")))
    assert {(run.config.steps, run.config.eval_every) for run in runs} == {PROTOCOL["vlcs"]}

"""Published hyper-parameters: figures from the releases, in a form that the settings accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchgen.config import Config
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.methods import METHODS, make_method
from patchgen.methods.presets import HOST_PRESETS, host_settings, published
from patchgen.model.backbone import BACKBONES


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (("miro", "vlcs", "resnet50"), {"lr": 1e-5, "weight_decay": 1e-6, "dropout": 0.5, "hparams": {"miro": 0.01}}),
        (
            ("miro", "terraincognita", "resnet50"),
            {"lr": 3e-5, "weight_decay": 1e-4, "dropout": 0.0, "hparams": {"miro": 0.1}},
        ),
        (
            ("miro", "domainnet", "clip-b16"),
            {"lr": 5e-5, "weight_decay": 0.0, "dropout": 0.0, "batch_per_domain": 24, "hparams": {"miro": 1.0}},
        ),
        (
            ("clipood", "officehome", "clip-b16"),
            {
                "lr": 1e-5,
                "weight_decay": 0.1,
                "batch_per_domain": 12,
                "steps": 5000,
                "eval_every": 500,
                "augmentation": "crop-flip",
                "select": "last",
                "normalization": "backbone",
                "hparams": {"margin": 0.3, "beta": 0.5},
            },
        ),
        (
            ("gestur", "domainnet", "clip-b16"),
            {"lr": 5e-5, "weight_decay": 1e-4, "dropout": 0.1, "batch_per_domain": 24, "hparams": {"gestur": 0.01}},
        ),
        (
            ("gmdg", "officehome", "resnet50"),
            {
                "lr": 3e-5,
                "weight_decay": 1e-6,
                "dropout": 0.1,
                "hparams": {"miro": 0.1, "shift": 0.001, "domain": 0.1, "lr_mult": 20.0},
            },
        ),
        (
            ("gestur", "vlcs", "resnet50"),
            {"lr": 5e-5, "weight_decay": 1e-4, "dropout": 0.5, "hparams": {"gestur": 0.05}},
        ),
    ],
)
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
    assert host_settings("lreg", "vlcs", "regnety-16gf", task="mdg_gcd")["hparams"] == {"lreg": 0.5}


@pytest.mark.parametrize(
    "asked",
    [("miro", "pacs", "dinov2-small"), ("miro", "histocolon", "resnet50"), ("patchgen", "pacs", "resnet50"),
     ("miro", None, "resnet50"), ("gestur", "pacs", "regnety-16gf")],
)  # fmt: skip
def test_what_is_not_published_is_empty(asked: tuple[str, str | None, str]) -> None:
    assert host_settings(*asked) == {}


def test_an_answer_is_the_callers_own() -> None:
    host_settings("miro", "pacs", "resnet50")["hparams"]["miro"] = 7
    assert host_settings("miro", "pacs", "resnet50")["hparams"] == {"miro": 0.01}


def test_every_entry_is_accepted_as_settings() -> None:
    for method, benchmarks in HOST_PRESETS.items():
        assert method in METHODS and set(benchmarks) <= set(BENCHMARKS)
        for variants in benchmarks.values():
            for variant, settings in variants.items():
                assert variant.split()[0] in BACKBONES
                make_method(Config(data="photos", unseen="site_c", method=method, **settings))


def test_published_values_are_found_by_the_folders_name(tmp_path: Path) -> None:
    for domain in ("Caltech101", "LabelMe"):
        (tmp_path / "VLCS" / domain).mkdir(parents=True)
    found = published(str(tmp_path / "VLCS"), None, "patchgen+miro", "resnet50")
    assert found == host_settings("miro", "vlcs", "resnet50") != {}
    assert published(str(tmp_path), None, "patchgen+miro", "resnet50") == {}
    assert published(str(tmp_path), "vlcs", "miro", "resnet50") == found
    assert published(str(tmp_path / "VLCS"), None, "patchgen", "resnet50") == {}

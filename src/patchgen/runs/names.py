"""What runs, their data sets and their backbones are called in tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from patchgen.data.benchmarks import BENCHMARKS

if TYPE_CHECKING:
    from patchgen.runs.scores import Run

STREAM_DATA = {"cifar100binary": "CIFAR-100", "cifar100python": "CIFAR-100", "cifar100": "CIFAR-100",
               "cub2002011": "CUB", "cub": "CUB"}  # fmt: skip
PAPER_DATA = {"pacs": "PACS", "vlcs": "VLCS", "officehome": "OfficeHome", "terraincognita": "TerraIncognita",
              "domainnet": "DomainNet", "histopantum": "HISTOPANTUM", "histocolon": "HISTOCOLON"}  # fmt: skip
BACKBONES = {  # part of the weights' name -> the paper's (backbone, pretraining)
    "dinov2-small": ("ViT-S/14", "DINOv2"), "dinov2-base": ("ViT-B/14", "DINOv2"),
    "dinov2-large": ("ViT-L/14", "DINOv2"), "dino-vitb16": ("ViT-B/16", "DINO"), "vit-mae-base": ("ViT-B/16", "MAE"),
    "clip-vit-base-patch16": ("ViT-B/16", "CLIP"), "vit_tiny_patch16_224": ("ViT-Ti/16", "ImageNet"),
}  # fmt: skip


def data_name(config: Any) -> str:
    """The paper's name of a data set, the oracle set's, or that of the folder."""
    path = PurePath(config.data)
    oracle = re.search(r"(oracle-[a-z]+)(?:-[0-9a-f]{12})?(?:/images)?/?$", path.as_posix())
    if oracle:
        return oracle[1]
    if config.task == "ccd":
        name = STREAM_DATA.get(re.sub(r"[\W_]", "", path.name.casefold()), path.name)
        return name if config.schedule == "paper" else f"{name}, {PurePath(config.schedule).stem}"
    path = path.parent if path.name == "images" else path  # a set with masks next to the images
    known = config.benchmark or next((name for name, entry in BENCHMARKS.items() if entry.is_called(path.name)), "")
    return PAPER_DATA.get(known, known) or (path.stem if path.suffix == ".csv" else path.name)


def paper_backbone(resolved: str) -> tuple[str, str]:
    """The paper's names of a backbone and its pretraining; two empty strings for other backbones."""
    return next((names for part, names in BACKBONES.items() if part in resolved), ("", ""))


def backbone_name(resolved: str) -> str:
    """The paper's words for a backbone, or its own name."""
    return " ".join(filter(None, paper_backbone(resolved))) or resolved


def label_of(config: Any) -> str:
    """The label of a run in tables: `lp-ln@mean`, `patchgen@full`, `patchgen, no L_conf, tau 0.5`."""
    default = type(config)
    tune = config.tune if config.task != "ccd" else None  # all runs of a stream setup tune the same
    words = "".join(f"@{word}" for word in (config.pool, tune) if word)
    notes = []
    if "patchgen" in config.method and config.method != "patchgen-no-losses":
        names = ("lambda_ms", "lambda_conf", "lambda_sim")
        notes = [f"no L_{name.removeprefix('lambda_')}" for name in names if getattr(config, name) == 0]
        changed = [name for name in ("lambda_conf", "tau") if getattr(config, name) not in (0, getattr(default, name))]
        notes += [f"{name} {getattr(config, name):g}" for name in changed]
    for name, word in (("refine", "refine"), ("rho_start", "rho"), ("spread", "spread")):
        if getattr(config, name) != getattr(default, name):
            notes.append(f"{word} {getattr(config, name)}")
    if config.task != "ccd" and config.select != "source-validation":
        notes.append(f"checkpoint: {config.select}" + " (LOOKS AT THE UNSEEN DOMAIN)" * (config.select == "oracle"))
    return ", ".join([config.method + words, *notes])


def name_apart(runs: Iterable[Run]) -> list[Run]:
    """The runs in their order; if several data sets have the same name, all but the first get a number.

    The fingerprint in a run folder tells data sets apart, in folders of earlier versions the rows alone: the same rows
    at two paths are a data set that was moved. The first data set is that whose path comes first alphabetically.
    """
    named = {run.path: run for run in runs}
    ordered = sorted(named.values(), key=lambda run: (run.config.data, str(run.path)))
    fingerprints = {(run.dataset, run.rows): run.data for run in reversed(ordered) if run.data}
    sets: dict[str, dict[str, list[Run]]] = {}  # name -> fingerprint or rows -> runs
    for run in ordered:
        data = run.data or fingerprints.get((run.dataset, run.rows), run.rows)
        sets.setdefault(run.dataset, {}).setdefault(data, []).append(run)
    for name, groups in ((name, list(of_name.values())) for name, of_name in sets.items() if len(of_name) > 1):
        paths = [group[0].config.data for group in groups]
        for number, group in enumerate(groups, 1):
            title, place = f"{name} ({number})" if number > 1 else name, group[0].config.data
            if paths.count(place) > 1:
                folders = sorted(run.path.name for run in group)
                place += f" in the runs {', '.join(folders[:3])}{', ...' * (len(folders) > 3)}"
            named |= {run.path: replace(run, dataset=title, place=place) for run in group}
    return list(named.values())

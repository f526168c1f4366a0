"""The settings of a preset for a method and its data, and the published settings of the host methods.

Sources of `published.csv`: the README files of MIRO (and its authors' answers on CLIP), GMDG, GESTUR, CLIPood, DPL,
DUPRG and MoA, the scripts of L-Reg, and PromptStyler's paper; an empty cell is not published. What a command leaves out
has the default of these code bases. GESTUR's batch on CLIP is MIRO's, as its author requested; `regnety-16gf` means the
SWAG weights. Nothing is published for other backbones, nor for LayerNorm tuning: a method then gets only its weights.
"""

import csv
from collections.abc import Mapping
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml

from patchgen.config import PRESETS, Pool, Tune, mask_lr
from patchgen.data.benchmarks import Benchmark, get_benchmark, match_benchmark

Settings = dict[str, Any]  # fields of Config


def preset_settings(preset: str, method: str = "", data: str = "", benchmark: str | None = None) -> Settings:
    """The settings of a preset: with `small` the method's learning rates, with `paper` the benchmark's protocol."""
    settings = dict(PRESETS.get(preset, {}))
    if preset == "paper" and (entry := _benchmark(data, benchmark)):
        settings |= {"steps": entry.steps, "eval_every": entry.checkpoint_every}
    return settings | (mask_lr(method) if preset == "small" else {})


def method_settings(label: str) -> dict[str, str]:
    """`lp-ln@mean` -> its method, pool and tuning mode."""
    method, *changes = label.split("@")
    settings = {"method": method}
    fields = dict.fromkeys(get_args(Pool), "pool") | dict.fromkeys(get_args(Tune), "tune")
    for word in changes:
        if word not in fields:
            raise ValueError(f"{label!r}: {word!r} is neither a pool nor a tuning mode ({', '.join(fields)})")
        settings[fields[word]] = word
    return settings


def own_hparams(given: Mapping[str, float], method: str) -> dict[str, float]:
    """The hyper-parameters that this method has, from those given for several methods."""
    from patchgen.methods import method_class

    known = [*method_class(method).all_defaults()]
    common = ["lr_mult"] if any(name.endswith("lr_mult") for name in known) else []  # for all of them
    return {name: value for name, value in given.items() if name in known + common}


def _read_published() -> dict[tuple[str, str, str], Settings]:
    """(method, benchmark, variant) -> settings; a variant is a backbone, with "swad" or the task where they matter."""
    text = resources.files("patchgen.methods").joinpath("published.csv").read_text(encoding="utf-8")
    table: dict[tuple[str, str, str], Settings] = {}
    for row in csv.DictReader(text.splitlines()):
        key = row.pop("method"), row.pop("benchmark"), row.pop("variant")
        table[key] = {"hparams": {}}
        for name, cell in row.items():
            if cell:
                group = table[key]["hparams"] if name.startswith("hparams.") else table[key]
                group[name.removeprefix("hparams.")] = yaml.safe_load(cell)
    return table


HOST_PRESETS: Mapping[tuple[str, str, str], Settings] = _read_published()
NEAREST = ("clip-b16", "regnety-16gf", "resnet50")  # in this order, for backbones without published values: a ViT first


def host_settings(
    method: str, benchmark: str | None, backbone_kind: str, *, task: str = "mdg", swad: bool = False
) -> Settings:
    """The published settings of a method (``miro``, not ``patchgen+miro``), or a similar backbone's loss weights."""

    def of(kind: str, task: str) -> Settings:
        variant = kind if task == "mdg" else f"{kind} {task}"
        names = (f"{variant} swad", variant) if swad else (variant,)
        return next((found for name in names if (found := HOST_PRESETS.get((method, benchmark or "", name)))), {})

    exact = of(backbone_kind, task)
    if exact or backbone_kind in NEAREST:
        return deepcopy(exact)
    others = (of(kind, other) for other in dict.fromkeys((task, "mdg", "mdg_gcd")) for kind in NEAREST)
    nearest = next((settings for settings in others if settings), None)
    return {"hparams": dict(nearest["hparams"])} if nearest else {}


def published(
    data: str, benchmark: str | None, method: str, backbone: str, *, task: str = "mdg", swad: bool = False
) -> Settings:
    """``host_settings`` for data recognised by its folder's name; for ``a+b``, of the last part that has any."""
    entry = _benchmark(data, benchmark)
    name = entry.name if entry else None
    parts = (host_settings(part, name, backbone, task=task, swad=swad) for part in reversed(method.split("+")))
    return next((settings for settings in parts if settings), {})


def _benchmark(data: str, benchmark: str | None) -> Benchmark | None:
    """The named benchmark, or the one that matches the name of the data folder."""
    if benchmark:
        return get_benchmark(benchmark)
    return match_benchmark(Path(data)) if data and Path(data).is_dir() else None

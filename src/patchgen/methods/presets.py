"""The settings of a preset for a method and its data, and the published settings of the host methods.

    preset_settings("paper", data="domain_net")       # {..., "steps": 15001, "eval_every": 500}
    host_settings("miro", "pacs", "resnet50")         # {"lr": 3e-5, "weight_decay": 0.0, "dropout": 0.0, "hparams": {}}
    host_settings("gmdg", "pacs", "dinov2-large")     # {"hparams": ...}

Sources: the tables and commands in the README files of MIRO (and its authors' answers on CLIP), GMDG, GESTUR, CLIPood,
DPL, DUPRG and MoA, the scripts of L-Reg, and PromptStyler's paper. GESTUR's table has no separate values for CLIP; the
batch is MIRO's, as its author requested. If a command leaves out the learning rate, weight decay or dropout, the values
are the common defaults of these code bases (5e-5, 0, 0); if a release states only a loss weight, so does the entry.
`regnety-16gf` means the SWAG weights (docs/study/mdg.md).

Nothing is published for other backbones, nor for LayerNorm tuning. In these cases a method gets its loss weights
(`hparams`) from the nearest published backbone, but no learning rate, decay, dropout or batch size: those remain the
same for all rows, as in the paper's matched comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from patchgen.config import PRESETS, Pool, Tune
from patchgen.data.benchmarks import Benchmark, get_benchmark, match_benchmark

Settings = dict[str, Any]  # fields of Config

ORDER = ("pacs", "vlcs", "officehome", "terraincognita", "domainnet")  # column order of every row below
DEFAULT = {"lr": 5e-5, "weight_decay": 0.0, "dropout": 0.0}


def preset_settings(preset: str, method: str = "", data: str = "", benchmark: str | None = None) -> Settings:
    """The settings of a preset: with `small` the method's learning rates, with `paper` the benchmark's protocol."""
    settings = dict(PRESETS.get(preset, {}))
    if preset == "paper" and (entry := _benchmark(data, benchmark)):
        settings |= {"steps": entry.steps, "eval_every": entry.checkpoint_every}
    if preset == "small" and method:
        from patchgen.methods import method_class

        names = ("lr", "lr_backbone", "lr_module")
        rates = zip(names, method_class(method).small_rates, strict=True)
        settings |= {name: rate for name, rate in rates if rate is not None}
    return settings


def method_settings(label: str) -> dict[str, str]:
    """`lp-ln@mean` -> its method, pool and tuning mode."""
    method, *changes = label.split("@")
    settings = {"method": method}
    for word in changes:
        if word in get_args(Pool):
            settings["pool"] = word
        elif word in get_args(Tune):
            settings["tune"] = word
        else:
            known = ", ".join((*get_args(Pool), *get_args(Tune)))
            raise ValueError(f"{label!r}: {word!r} is neither a pool nor a tuning mode ({known})")
    return settings


def own_hparams(given: Mapping[str, float], method: str) -> dict[str, float]:
    """The hyper-parameters that this method has, from those given for several methods."""
    from patchgen.methods import method_class

    known = set(method_class(method).all_defaults())
    if any(name.endswith("lr_mult") for name in known):
        known.add("lr_mult")  # the common name for all of them
    return {name: value for name, value in given.items() if name in known}


def _by_benchmark(common: Settings | None = None, **columns: tuple[float, ...]) -> dict[str, Settings]:
    """One row per field, one column per benchmark; names that are not fields of Config are hyper-parameters."""
    entries: dict[str, Settings] = {}
    for i, benchmark in enumerate(ORDER):
        values = {name: row[i] for name, row in columns.items()}
        fields = {name: values.pop(name) for name in (*DEFAULT, "batch_per_domain", "steps") if name in values}
        entries[benchmark] = {**(common or {}), **fields, "hparams": values}
    return entries


_CLIP_BATCH = (32, 32, 32, 32, 24)
_CLIP_PIXELS: Settings = {"normalization": "backbone"}  # CLIP's mean and std
_REGNET_BATCH = (16, 16, 16, 16, 14)  # GMDG's; MIRO uses 16 for DomainNet too
_GESTUR: dict[str, Any] = {
    "lr": (5e-5,) * 5,
    "weight_decay": (0.0, 1e-4, 1e-6, 0.0, 1e-4),
    "dropout": (0.0, 0.5, 0.5, 0.0, 0.1),
    "gestur": (0.01, 0.05, 0.01, 0.01, 0.01),
}
_GCD_BATCH = (22, 22, 22, 22, 14)
_GCD_MULT = (0.5, 2.0, 1.0, 10.0, 1.0)

# method -> variant -> benchmark -> settings; a variant is a backbone, and "swad" or the task where they matter
_RELEASED: dict[str, dict[str, dict[str, Settings]]] = {
    "miro": {
        "resnet50": _by_benchmark(
            lr=(3e-5, 1e-5, 3e-5, 3e-5, 3e-5),
            weight_decay=(0.0, 1e-6, 1e-6, 1e-4, 0.0),
            dropout=(0.0, 0.5, 0.1, 0.0, 0.1),
            miro=(0.01, 0.01, 0.1, 0.1, 0.1),
        ),
        "resnet50 swad": _by_benchmark(DEFAULT, miro=(0.01, 0.01, 0.1, 0.1, 0.1)),
        "clip-b16": _by_benchmark(DEFAULT, batch_per_domain=_CLIP_BATCH, miro=(1.0,) * 5),
        "regnety-16gf": _by_benchmark(batch_per_domain=(16,) * 5, miro=(0.1, 0.01, 0.1, 0.01, 0.1)),
        "regnety-16gf swad": _by_benchmark(DEFAULT, batch_per_domain=(16,) * 5, miro=(0.01, 0.01, 0.01, 0.01, 0.1)),
        "regnety-16gf mdg_gcd": _by_benchmark(
            DEFAULT, batch_per_domain=_GCD_BATCH, miro=(0.01, 0.01, 0.01, 0.01, 0.1), lr_mult=_GCD_MULT
        ),
    },
    "gmdg": {
        "resnet50": _by_benchmark(
            lr=(5e-5, 1e-5, 3e-5, 5e-5, 5e-5),
            weight_decay=(0.0, 1e-6, 1e-6, 0.0, 0.0),
            dropout=(0.0, 0.5, 0.1, 0.0, 0.0),
            miro=(0.01, 0.01, 0.1, 0.1, 0.1),
            shift=(0.01, 0.001, 0.001, 0.1, 0.1),
            domain=(0.01, 0.1, 0.1, 0.2, 0.1),
            lr_mult=(25.0, 10.0, 20.0, 12.5, 7.5),
        ),
        "resnet50 swad": _by_benchmark(
            DEFAULT,
            miro=(0.01, 0.01, 0.1, 0.1, 0.1),
            shift=(0.001, 0.001, 0.1, 0.001, 0.1),
            domain=(0.1, 0.1, 0.3, 0.01, 0.1),
            lr_mult=(20.0, 10.0, 10.0, 10.0, 7.5),
        ),
        "regnety-16gf": _by_benchmark(
            DEFAULT,
            batch_per_domain=_REGNET_BATCH,
            miro=(0.01, 0.01, 0.01, 0.01, 0.1),
            shift=(0.1, 0.01, 0.1, 0.01, 0.1),
            domain=(0.1, 0.1, 0.1, 0.01, 0.1),
            lr_mult=(0.1, 2.0, 0.1, 2.5, 10.0),
        ),
        "regnety-16gf mdg_gcd": _by_benchmark(
            DEFAULT,
            batch_per_domain=_GCD_BATCH,
            miro=(0.01, 0.01, 0.01, 0.01, 0.1),
            shift=(0.1, 0.01, 0.1, 0.01, 0.1),
            domain=(0.1, 0.1, 0.1, 0.01, 0.1),
            lr_mult=(0.5, 2.0, 1.0, 5.0, 1.0),
        ),
    },
    "gestur": {
        "resnet50": _by_benchmark(**_GESTUR),
        "clip-b16": _by_benchmark(**_GESTUR, batch_per_domain=_CLIP_BATCH),
    },
    "clipood": {
        "clip-b16": _by_benchmark(
            {**_CLIP_PIXELS, "weight_decay": 0.1, "augmentation": "crop-flip", "select": "last", "eval_every": 500},
            lr=(5e-6, 5e-6, 1e-5, 5e-6, 1e-5),
            batch_per_domain=(12,) * 5,
            steps=(5000, 5000, 5000, 5000, 10000),
            margin=(0.3,) * 5,
            beta=(0.5,) * 5,
        ),
    },
    "dpl": {
        "clip-b16": _by_benchmark({**_CLIP_PIXELS, "weight_decay": 0.0, "augment": False}, lr=(1e-3,) * 5),
    },
    **{method: {"clip-b16": _by_benchmark({**_CLIP_PIXELS, "steps": 1})} for method in ("duprg", "promptstyler")},
    **{
        method: {"openclip-b16": _by_benchmark({**_CLIP_PIXELS, **DEFAULT}, steps=(5001, 5001, 5001, 5001, 15001))}
        for method in ("kadaptation", "kadaptation-moa")
    },
    "lreg": {  # on top of `pim-lreg` the release has 0.01 for PACS
        "regnety-16gf mdg_gcd": _by_benchmark(DEFAULT, batch_per_domain=_GCD_BATCH, lreg=(0.1, 0.5, 0.1, 0.1, 0.1)),
    },
    "pim-lreg": {
        "regnety-16gf mdg_gcd": _by_benchmark(
            DEFAULT, batch_per_domain=_GCD_BATCH, confidence=(0.1,) * 5, lr_mult=(0.25, *_GCD_MULT[1:])
        ),
    },
}

# method -> benchmark -> variant -> settings
HOST_PRESETS: Mapping[str, Mapping[str, Mapping[str, Settings]]] = {
    method: {benchmark: {name: rows[benchmark] for name, rows in variants.items()} for benchmark in ORDER}
    for method, variants in _RELEASED.items()
}


NEAREST = ("clip-b16", "regnety-16gf", "resnet50")  # in this order, for backbones without published values: a ViT first


def host_settings(
    method: str, benchmark: str | None, backbone_kind: str, *, task: str = "mdg", swad: bool = False
) -> Settings:
    """The published settings of a method for this benchmark, as fields of Config; empty if there are none.

    Args:
        method: A name of ``METHODS``; for ``patchgen+miro``, pass ``miro``.
        benchmark: A name of ``BENCHMARKS``; None for other data.
        backbone_kind: A name of ``BACKBONES``; resnet50, regnety-16gf and clip-b16 have published settings, and any
            other gets only the loss weights of the nearest of these.
        task: ``mdg`` or ``mdg_gcd``.
        swad: Prefer the values published with SWAD, if they differ.
    """
    variants = HOST_PRESETS.get(method, {}).get(benchmark or "", {})
    exact = _variant(variants, backbone_kind, task, swad)
    if exact or backbone_kind in NEAREST:
        return deepcopy(exact)
    tasks = dict.fromkeys((task, "mdg", "mdg_gcd"))
    others = (_variant(variants, kind, other, swad) for other in tasks for kind in NEAREST)
    found = next((settings["hparams"] for settings in others if settings), None)
    return {"hparams": dict(found)} if found else {}


def _variant(variants: Mapping[str, Settings], kind: str, task: str, swad: bool) -> Settings:
    plain = kind if task == "mdg" else f"{kind} {task}"
    return (variants.get(f"{plain} swad") if swad else None) or variants.get(plain, {})


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

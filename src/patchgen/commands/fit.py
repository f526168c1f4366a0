"""patchgen fit DATA --out MODEL: from images of several sites to a model folder, and what to expect at a new site."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, chosen, merged, name_tracker, parse, print_table, require_data, settings_of
from patchgen.config import NO_DOMAIN, PRESETS, Config, SplitRule, Task
from patchgen.fit import ALONE, COMPARED
from patchgen.train.track import Tracking

if TYPE_CHECKING:
    from patchgen.predict.model_folder import Model


@dataclass(frozen=True)
class FitArguments(Config):
    """Leave each site out in turn with each method, keep the better one, train it on all sites, write a model folder.

    Resumable with the same command: every training is a run folder below --runs.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Folder `site/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    out: str = tyro.MISSING
    """The model folder to write; an older model there is replaced."""
    unseen: str = NO_DOMAIN
    """Leave out only this site, score it, and keep the model that was trained without it."""
    split: SplitRule = "domainbed"
    """How a site is split; `group` if a manifest has groups (within a site, no patient appears on both sides)."""
    task: tyro.conf.Suppress[Task] = "mdg"
    methods: tuple[str, ...] = COMPARED
    """Methods to compare at left-out sites, simplest first: a later one must be better by more than chance."""
    method: str = ALONE
    """Train only this method: a name of `patchgen methods`; `+` adds the terms of another. Also used with --unseen and
    --no-expect, which do not compare methods."""
    expect: bool = True
    """Leave each site out in turn first, to estimate the accuracy at a new site; --no-expect skips it."""
    with_backbone: bool = True
    """Put the backbone's weights into the folder, so that it works offline elsewhere."""
    preset: Literal["small", "paper"] = "small"
    """`small`: minutes per training on two cores. `paper`: the usual 5001 steps at 224 px."""
    runs: str = "runs"
    """Parent of the run folders."""
    track: Tracking | None = None
    """Log every training to TensorBoard (`--track` alone), W&B or MLflow; nothing is sent over the network."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print one JSON object (model, scores, expected accuracy) instead of tables."""

    def check(self) -> None:
        """No check here: the settings are checked when they are built, with errors that name the option."""


def main(argv: list[str]) -> int:
    argv = name_tracker(argv)
    arguments = parse(FitArguments, "fit", argv, default=FitArguments(data=tyro.MISSING, **PRESETS["small"]))
    require_data(arguments.data)
    announce(arguments.quiet)
    words = chosen(arguments, argv)
    configs = _configs(arguments, words)
    from patchgen.common.files import check_writable
    from patchgen.common.progress import is_news, saying_once
    from patchgen.fit.procedure import fit
    from patchgen.predict.model_folder import check_method, check_target, write_model

    if not arguments.out.strip():
        raise ValueError("--out is empty (an unset variable?); name the model folder to write")
    check_target(Path(arguments.out))
    check_writable(arguments.out, "--out")
    check_writable(arguments.runs, "--runs")
    for config in configs:
        check_method(config.method, arguments.with_backbone)
    with saying_once():
        model = fit(configs, arguments.runs, expecting=arguments.expect, split_given="split" in words,
                    quiet=arguments.quiet, track=arguments.track or False)  # fmt: skip
        folder = write_model(arguments.out, model, with_backbone=arguments.with_backbone)
        if is_news(model.predictor.model.backbone.description) and not arguments.quiet:
            print(f"backbone: {model.predictor.model.backbone.description}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"model": str(folder), **_known(model)}, indent=2))
    else:
        _print(model)
        print(folder)
    return 0


def _configs(arguments: FitArguments, words: dict[str, Any]) -> list[Config]:
    """The settings of each method to compare, or of the single one."""
    from patchgen.methods import compared_methods
    from patchgen.methods.presets import method_settings, own_hparams, preset_for

    if "method" in words and "methods" in words:
        raise ValueError("--method and --methods exclude each other: one method, or several to compare")
    alone = arguments.unseen != NO_DOMAIN or not arguments.expect
    single = "method" in words or (alone and "methods" not in words)
    labels = (arguments.method,) if single else compared_methods(arguments.methods)
    if not labels:
        raise ValueError(f"--methods needs at least one name, such as {ALONE} (`patchgen methods` lists them)")
    if single and "method" not in words and not arguments.quiet:
        print(f"method: {ALONE}; to compare several, let each site be left out in turn", file=sys.stderr)
    configs, unknown = [], set(arguments.hparams)
    for label in labels:
        own = {**words, **method_settings(label)}
        usual = {name: getattr(arguments, name) for name in ("data", "unseen", "task")}
        if len(labels) > 1:
            own["hparams"] = own_hparams(arguments.hparams, own["method"])
            unknown -= set(own["hparams"])
        preset = preset_for(dataclasses.replace(arguments, method=own["method"]))
        configs.append(settings_of(Config, merged(preset, {**usual, **own})))
    if len(labels) > 1 and unknown:
        raise ValueError(f"--hparams {min(unknown)}: none of the methods has it (`patchgen methods` lists them)")
    return configs


def _known(model: Model) -> dict[str, Any]:
    names = ("expected", "folds", "choice", "calibration", "data", "run", "checkpoint")
    method = {"method": model.predictor.config.method}
    return {
        **method,
        **{name: model.about[name] for name in names},
        "temperature": model.predictor.confidence.temperature,
    }


def _print(model: Model) -> None:
    from patchgen.fit.expect import Expected

    about, found = model.about, model.about["calibration"]
    if about["folds"]:
        several = {one["method"] for one in about["folds"]} != {model.predictor.config.method}
        rows = [
            [one["site"], f"{one['accuracy']:.3f}", str(one["images"]), f"{one['validation']:.3f}",
             ", ".join(one["uncovered"]), *[one["method"]] * several]
            for one in about["folds"]
        ]  # fmt: skip
        head = ("site left out", "accuracy there", "images", "at the others", "classes only there")
        print_table((*head, *["method"] * several), rows)
        _print_choice(about["choice"])
        what = "expected accuracy at a new site" if len(about["folds"]) > 1 else "accuracy at the one site left out"
        print(f"{what}: {Expected(**about['expected'])}")
    else:
        print("expected accuracy at a new site: not known (--no-expect)")
    print(
        f"confidence: temperature {model.predictor.confidence.temperature:.3f}, calibration error "
        f"{found['ece_before']:.4f} -> {found['ece_after']:.4f} on {found['images']} source validation images"
    )


def _print_choice(choice: dict[str, Any] | None) -> None:
    from patchgen.predict.card import comparison_sentence

    if choice:
        for one in choice["comparisons"]:
            print(comparison_sentence(one, choice["images"]))
        print(f"kept: {choice['chosen']}")

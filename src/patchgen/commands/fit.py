"""patchgen fit DATA --out MODEL: from images of several sites to a model folder, and what to expect at a new site."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, chosen, merged, parse, print_table, require_data, settings_of
from patchgen.config import NO_DOMAIN, PRESETS, Config, SplitRule, Task

if TYPE_CHECKING:
    from patchgen.predict.model_folder import Model


@dataclass(frozen=True)
class FitArguments(Config):
    """Leave each site out in turn to say what to expect at a new one, train on all sites, write a model folder.

    The same command goes on after it was stopped: every training is a run folder below --runs.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Folder `site/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    out: str = tyro.MISSING
    """The model folder to write; an older model there is replaced."""
    unseen: str = NO_DOMAIN
    """Leave this site alone out, score it, and keep the model that was trained without it."""
    split: SplitRule = "domainbed"
    """How a site is split; where a manifest names groups it is `group` (a patient is never on both sides of a site)."""
    task: tyro.conf.Suppress[Task] = "mdg"
    method: str = "patchgen-select"
    """A name of `patchgen methods`; with `+` the terms of others are added."""
    expect: bool = True
    """Leave each site out in turn first; without, nothing is known of a new site."""
    with_backbone: bool = True
    """Put the backbone's weights into the folder, so that it works offline elsewhere."""
    preset: Literal["small", "paper"] = "small"
    """`small`: minutes a training on two cores. `paper`: the field's 5001 steps at 224 px."""
    runs: str = "runs"
    """Parent of the run folders."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print what is known of the model as one JSON object instead of tables."""

    def check(self) -> None:
        """Nothing is checked before the settings are made of these: there an error names its option."""


def main(argv: list[str]) -> int:
    arguments = parse(FitArguments, "fit", argv, default=FitArguments(data=tyro.MISSING, **PRESETS["small"]))
    require_data(arguments.data)
    announce(arguments.quiet)
    from patchgen.methods.presets import preset_for

    words = chosen(arguments, argv)
    usual = {name: getattr(arguments, name) for name in ("data", "unseen", "method", "task")}
    config = settings_of(Config, merged(preset_for(arguments), {**usual, **words}))
    from patchgen.fit.procedure import fit
    from patchgen.predict.model_folder import check_method, check_target, write_model

    if not arguments.out.strip():
        raise ValueError("--out is empty (an unset variable?); name the model folder to write")
    check_target(Path(arguments.out))
    check_method(config.method, arguments.with_backbone)
    named = "split" in words
    model = fit(config, arguments.runs, expecting=arguments.expect, split_given=named, quiet=arguments.quiet)
    folder = write_model(arguments.out, model, with_backbone=arguments.with_backbone)
    if arguments.json:
        print(json.dumps({"model": str(folder), **_known(model)}, indent=2))
    else:
        _print(model)
        print(folder)
    return 0


def _known(model: Model) -> dict[str, Any]:
    names = ("expected", "folds", "calibration", "data", "run", "checkpoint")
    return {**{name: model.about[name] for name in names}, "temperature": model.predictor.confidence.temperature}


def _print(model: Model) -> None:
    from patchgen.fit.expect import Expected

    about, found = model.about, model.about["calibration"]
    if about["folds"]:
        rows = [
            [one["site"], f"{one['accuracy']:.3f}", str(one["images"]), f"{one['validation']:.3f}",
             ", ".join(one["uncovered"])]
            for one in about["folds"]
        ]  # fmt: skip
        print_table(("site left out", "accuracy there", "images", "at the others", "classes only there"), rows)
        what = "expected accuracy at a new site" if len(about["folds"]) > 1 else "accuracy at the one site left out"
        print(f"{what}: {Expected(**about['expected'])}")
    else:
        print("expected accuracy at a new site: not known (--no-expect)")
    print(
        f"confidence: temperature {model.predictor.confidence.temperature:.3f}, calibration error "
        f"{found['ece_before']:.4f} -> {found['ece_after']:.4f} on {found['images']} source validation images"
    )
    if note := about["backbone"]["note"]:
        print(f"backbone: {about['backbone']['resolved']} ({note})", file=sys.stderr)

"""patchgen fit DATA --out MODEL: from images of several sites to a model folder, and what to expect at a new site."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from patchgen.commands import Maybe, print_table
from patchgen.commands.settings import Layers, StartOptions, configs_of, parse_settings, preset_layers, settings_schema
from patchgen.common.text import json_text
from patchgen.config import NO_DOMAIN, Config
from patchgen.fit import BEST, COMPARED
from patchgen.train.track import Tracking

if TYPE_CHECKING:
    from patchgen.predict.model_folder import Model


USUAL = ("fit", {"unseen": NO_DOMAIN, "method": BEST})


@dataclass(frozen=True, kw_only=True)
class FitOptions(StartOptions):
    """Leave each site out in turn with each method, keep the better one, train it on all sites, write a model folder.

    Resumable with the same command: every training is a run folder below --runs.
    """

    command: ClassVar = "fit"
    hidden: ClassVar = ("task", "known", "unlabelled", "labelled_share", "num_classes")
    texts: ClassVar = {
        "data": "Folder `site/class/*.jpg` (`class/*.jpg` is one site), or CSV manifest (path, domain, label, optional "
        "group).",
        "unseen": "Leave out only this site, score it, and keep the model that was trained without it.",
        "method": "Train only this method: a name of `patchgen methods`; `+` adds the terms of another. Also used with "
        "--unseen and --no-expect, which do not compare methods.",
        "split": "How a site is split; `group` if a manifest has groups (within a site, no patient on both sides).",
    }

    out: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """The model folder to write; an older model there is replaced."""
    methods: Maybe[tuple[str, ...]] = None
    """Methods to compare at left-out sites, simplest first: a later one must be better by more than chance; by default
    lp-ln, patchgen and patchgen-cls."""
    expect: bool = True
    """Leave each site out in turn first, to estimate the accuracy at a new site; --no-expect skips it."""
    with_backbone: bool = True
    """Put the backbone's weights into the folder, so that it works offline elsewhere."""
    quick: bool = False
    """A first model in some minutes: one method, on stored tokens of the lower half of the backbone."""
    minutes: Maybe[float] = None
    """Choose methods, steps and image size to end in about this time; settings that you name are kept."""
    runs: str = "runs"
    """Parent of the run folders."""
    track: Maybe[Tracking] = None
    """Log every training to TensorBoard (`--track` alone), W&B or MLflow; nothing is sent over the network."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print one JSON object (model, scores, expected accuracy) instead of tables."""

    def layers(self, given: Mapping[str, Any]) -> Layers:
        given = {**USUAL[1], **given}
        if self.quick and (self.preset or self.config):
            raise ValueError("--quick excludes --preset and --config: it is a preset of its own")
        layers = preset_layers("quick", given) if self.quick else super().layers(given)
        own = [(source, {n: v for n, v in values.items() if n not in self.hidden}) for source, values in layers]
        return [USUAL, *own]


COMMAND = settings_schema(FitOptions)


def main(argv: list[str]) -> int:
    options, given = parse_settings(FitOptions, argv)
    configs = _configs(options, given)
    from patchgen.common.files import check_writable
    from patchgen.common.progress import is_first, print_once
    from patchgen.fit.procedure import fit
    from patchgen.predict.model_folder import check_method, check_target, write_model

    if not options.out:
        raise ValueError("--out is missing: name the model folder to write")
    check_target(Path(options.out))
    check_writable(options.out, "--out")
    check_writable(options.runs, "--runs")
    for config in configs:
        check_method(config.method, options.with_backbone)
    with print_once():
        model = fit(configs, options.runs, expecting=options.expect, split_given="split" in given,
                    quiet=options.quiet, track=options.track or False, minutes=options.minutes,
                    fixed=[*given, *(["methods"] if options.methods else [])], stop_at_quick=_stops)  # fmt: skip
        folder = write_model(options.out, model, with_backbone=options.with_backbone)
        if is_first(model.predictor.model.backbone.description) and not options.quiet:
            print(f"backbone: {model.predictor.model.backbone.description}", file=sys.stderr)
    if options.json:
        names = ("expected", "folds", "choice", "calibration", "data", "run", "checkpoint")
        facts = {"model": str(folder), "method": model.predictor.config.method}
        facts |= {name: model.about[name] for name in names}
        print(json_text({**facts, "temperature": model.predictor.confidence.temperature}))
    else:
        _print(model)
        print(folder)
    return 0


def _stops(offer: str) -> bool:
    """Ask whether the quick model is enough; not where nobody can answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print("Stop here and write the quick model? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _configs(options: FitOptions, given: dict[str, Any]) -> list[Config]:
    """The settings of each method to compare, or of the single one."""
    from patchgen.methods import compared_methods

    if "method" in given and options.methods is not None:
        raise ValueError("--method and --methods exclude each other: one method, or several to compare")
    alone = given.get("unseen", NO_DOMAIN) != NO_DOMAIN or not options.expect or options.quick
    single = "method" in given or (alone and options.methods is None)
    methods = COMPARED if options.methods is None else options.methods
    labels = (given.get("method", BEST),) if single else compared_methods(methods)
    if not labels:
        raise ValueError(f"--methods needs at least one name, such as {BEST} (`patchgen methods` lists them)")
    if single and "method" not in given and not options.quiet:
        print(f"method: {BEST}; name several with --methods to compare them at left-out sites", file=sys.stderr)
    return configs_of(labels, given, options.layers)


def _print(model: "Model") -> None:
    from patchgen.fit.expect import Expected
    from patchgen.predict.card import comparison_sentence

    folds, choice, calibration = (model.about[name] for name in ("folds", "choice", "calibration"))
    if folds:
        several = {fold["method"] for fold in folds} != {model.predictor.config.method}
        rows = [
            [fold["site"], f"{fold['accuracy']:.3f}", str(fold["images"]), f"{fold['validation']:.3f}",
             ", ".join(fold["uncovered"]), *[fold["method"]] * several]
            for fold in folds
        ]  # fmt: skip
        head = ("site left out", "accuracy there", "images", "at the others", "classes only there")
        print_table((*head, *["method"] * several), rows)
        if choice:
            for comparison in choice["comparisons"]:
                print(comparison_sentence(comparison, choice["images"]))
            print(f"kept: {choice['chosen']}")
        what = "expected accuracy at a new site" if len(folds) > 1 else "accuracy at the one site left out"
        print(f"{what}: {Expected(**model.about['expected'])}")
    else:
        why = "only one site" if len(model.about["data"]["sites"]) == 1 else "--no-expect"
        print(f"expected accuracy at a new site: not known ({why})")
    print(
        f"confidence: temperature {model.predictor.confidence.temperature:.3f}, calibration error "
        f"{calibration['ece_before']:.4f} -> {calibration['ece_after']:.4f} on {calibration['images']} source "
        "validation images"
    )

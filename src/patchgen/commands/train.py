"""patchgen train DATA --unseen NAME, or --task ccd: one run folder, its path as the last line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from patchgen.ccd.settings import SMALL, StreamConfig, stream_preset
from patchgen.commands import announce, chosen, merged, name_tracker, parse, require_data, settings_of
from patchgen.config import PRESETS, Config, Settings, config_class, load_settings, read_settings
from patchgen.train.track import Tracking


@dataclass(frozen=True)
class _Options:
    """The options of `train` in addition to the settings of a run."""

    preset: Literal["small", "paper"] = "small"
    """`small`: minutes on two cores. `paper`: the published protocol (5001 steps, DomainNet 15001)."""
    config: str | None = None
    """YAML file of settings (such as a run's config.yaml) to start from instead of a preset."""
    out: str = "runs"
    """Parent of the run folder."""
    quiet: bool = False
    """No progress."""
    track: Tracking | None = None
    """Log each evaluation to TensorBoard (`--track` alone), W&B or MLflow; nothing is sent over the network."""
    json: bool = False
    """Print the run folder and its scores as one JSON object instead of the folder."""

    def check(self) -> None:
        """No check here: the settings are checked when they are built, with errors that name the option."""


@dataclass(frozen=True)
class TrainArguments(_Options, Config):
    """Train one method with one domain unseen, select its checkpoint on the sources, score it on the unseen domain.

    For a stream of classes over time, see `patchgen train --task ccd --help`.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""


@dataclass(frozen=True)
class StreamArguments(_Options, StreamConfig):
    """Learn labelled classes, then discover new ones in stages of unlabelled images; score and draw the clusters."""

    data: Annotated[str, tyro.conf.Positional]
    """Folder `class/*.jpg`, `domain/class/*.jpg` or CSV manifest; or the official CIFAR-100 or CUB-200-2011 folder."""


def parsed(argv: list[str]) -> tuple[Any, Settings]:
    """The arguments, and the settings: command line first, then the file or preset."""
    kind: Any = StreamArguments if _task(argv) == "ccd" else TrainArguments
    needed = {"data": tyro.MISSING} if kind is StreamArguments else {"data": tyro.MISSING, "unseen": tyro.MISSING}
    shown = SMALL if kind is StreamArguments else PRESETS["small"]  # shown by help
    file = _first_words(argv).config
    if file and _first_words(argv).preset:
        raise ValueError("--config and --preset exclude each other: the file holds what a preset would set")
    if file:  # settings in a file need not be repeated
        needed |= {name: value for name, value in read_settings(file).items() if name in needed}
    arguments = parse(kind, "train", argv, default=kind(**{**shown, **needed}))
    words = chosen(arguments, argv) | {"data": arguments.data}
    config = config_class(arguments.task)
    if file:
        start = vars(load_settings(file, data=arguments.data))
    elif kind is StreamArguments:
        start = stream_preset(arguments.preset, arguments.data)
    else:
        from patchgen.methods.presets import preset_for  # imports torch

        start = preset_for(arguments)
    given = {"unseen": arguments.unseen} if kind is TrainArguments else {}
    return arguments, settings_of(config, merged(start, {**given, **words}))


def _first_words(argv: list[str]) -> argparse.Namespace:
    """The options that determine the other options and their defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--task", "--config", "--preset"):
        parser.add_argument(name)
    return parser.parse_known_args(argv)[0]


def _task(argv: list[str]) -> str | None:
    words = _first_words(argv)
    if words.task or not words.config or not Path(words.config).is_file():
        return words.task
    return read_settings(words.config).get("task")


def main(argv: list[str]) -> int:
    arguments, config = parsed(name_tracker(argv))
    require_data(config.data)
    announce(arguments.quiet)
    from patchgen.train.lifecycle import train

    finished = {file.parent.name for file in Path(arguments.out).glob("*/done")}
    run = train(config, arguments.out, quiet=arguments.quiet, track=arguments.track or False)
    if run.path.name in finished and not arguments.quiet:
        print("finished earlier: nothing to do", file=sys.stderr)
    if arguments.json:
        scores = (
            {"tests": run.records("test")}
            if config.task != "ccd"
            else {kind: run.records(kind) for kind in ("stage", "average")}
        )
        print(json.dumps({"run": str(run.path), **scores}, indent=2))
        return 0
    if not arguments.quiet:
        print((run.path / "summary.md").read_text(), file=sys.stderr)
    print(run.path)
    return 0

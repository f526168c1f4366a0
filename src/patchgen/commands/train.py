"""patchgen train DATA --unseen NAME: one run folder, its path as the last line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from patchgen.commands import (
    announce,
    before_preset,
    method_preset,
    option,
    parse,
    require_data,
    settings_of,
    train_stream,
)
from patchgen.config import Config, load_settings


@dataclass(frozen=True)
class TrainArguments(Config):
    """Train one method with one domain unseen, choose its checkpoint on the sources, score it on the unseen domain.

    A stream of classes over time has options of its own: `patchgen train --task ccd --help`.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    preset: Literal["small", "paper"] = "small"
    """`small`: minutes on two cores. `paper`: the field's protocol, 5001 steps (DomainNet 15001) at 224 px."""
    config: str | None = None
    """YAML file of settings (such as a run's config.yaml) to start from instead of a preset."""
    out: str = "runs"
    """Parent of the run folder."""
    quiet: bool = False
    """No progress."""
    track: bool = False
    """Write the numbers of each evaluation for TensorBoard (`tensorboard --logdir` of the runs; extra `track`)."""
    json: bool = False
    """Print the run folder and its scores as one JSON object instead of the folder."""

    def __post_init__(self) -> None:
        """Nothing is checked before the settings are made of these: there an error names its option."""


def defaults(argv: list[str]) -> dict[str, Any]:
    """What the options start from: a file's settings, or a preset's."""
    path, preset_name = option(argv, "--config", ""), option(argv, "--preset", "")
    if path and preset_name:
        raise ValueError("--config and --preset exclude each other: the file holds what a preset would set")
    if path:
        return vars(load_settings(path))
    preset = method_preset(argv, preset_name or "small", Config.method)
    if preset_name == "paper":
        preset |= _published(argv)
    return {"data": tyro.MISSING, "unseen": tyro.MISSING, **preset}


def _published(argv: list[str]) -> dict[str, Any]:
    """The benchmark's own protocol, and what the method's authors used on it, where they said so."""
    from patchgen.methods.presets import preset_settings, published

    words = before_preset(TrainArguments, "train", argv)
    if words is None:
        return {}
    found = published(words.data, words.benchmark, words.method, words.backbone, task=words.task, swad=words.swad)
    return preset_settings("paper", words.method, words.data, words.benchmark) | found


def main(argv: list[str]) -> int:
    if train_stream.asked(argv):  # a stream of stages has settings of its own
        return train_stream.main(argv)
    arguments = parse(TrainArguments, "train", argv, default=TrainArguments(**defaults(argv)))
    config = settings_of(arguments, Config)
    require_data(config.data)
    announce(arguments.quiet)
    from patchgen.train.lifecycle import train

    finished = {file.parent.name for file in Path(arguments.out).glob("*/done")}
    run = train(config, arguments.out, quiet=arguments.quiet, track=arguments.track)
    if run.path.name in finished and not arguments.quiet:
        print("finished earlier: nothing to do", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"run": str(run.path), "tests": run.records("test")}, indent=2))
        return 0
    if not arguments.quiet:
        print((run.path / "summary.md").read_text(), file=sys.stderr)
    print(run.path)
    return 0

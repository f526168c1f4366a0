"""patchgen train DATA --task ccd: a stream of stages; one run folder, its path as the last line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from patchgen.commands import announce, before_preset, option, parse, require_data, settings_of
from patchgen.config import load_settings, read_settings
from patchgen.config.stream import StreamConfig, stream_preset


@dataclass(frozen=True)
class StreamArguments(StreamConfig):
    """Learn labelled classes, then discover new ones in stages of unlabelled images; score and draw what was found."""

    data: Annotated[str, tyro.conf.Positional]
    """Folder `class/*.jpg`, `domain/class/*.jpg` or CSV manifest; or the official CIFAR-100 or CUB-200-2011 folder."""
    preset: Literal["small", "paper"] = "small"
    """`small`: 6 epochs a stage at 84 px. `paper`: the host's 200 epochs at 224 px."""
    config: str | None = None
    """YAML file of settings (such as a run's config.yaml) to start from instead of a preset."""
    out: str = "runs"
    """Parent of the run folder."""
    quiet: bool = False
    """No progress."""
    track: bool = False
    """Write the numbers of each epoch for TensorBoard (`tensorboard --logdir` of the runs; extra `track`)."""
    json: bool = False
    """Print the run folder and its scores as one JSON object instead of the folder."""

    def __post_init__(self) -> None:
        """Nothing is checked before the settings are made of these: there an error names its option."""


def asked(argv: list[str]) -> bool:
    """True where the words, or the file they start from, name this task."""
    if task := option(argv, "--task", ""):
        return task == "ccd"
    path = option(argv, "--config", "")
    return bool(path) and Path(path).is_file() and read_settings(path).get("task") == "ccd"


def defaults(argv: list[str]) -> dict[str, Any]:
    """What the options start from: a file's settings, or a preset's for this data."""
    path, preset = option(argv, "--config", ""), option(argv, "--preset", "")
    if path and preset:
        raise ValueError("--config and --preset exclude each other: the file holds what a preset would set")
    if path:
        return vars(load_settings(path))
    words = before_preset(StreamArguments, "train", argv)
    return {"data": tyro.MISSING, **stream_preset(preset or "small", words.data if words else "")}


def main(argv: list[str]) -> int:
    arguments = parse(StreamArguments, "train", argv, default=StreamArguments(**defaults(argv)))
    config = settings_of(arguments, StreamConfig)
    require_data(config.data)
    announce(arguments.quiet)
    from patchgen.train.lifecycle import train

    finished = {file.parent.name for file in Path(arguments.out).glob("*/done")}
    run = train(config, arguments.out, quiet=arguments.quiet, track=arguments.track)
    if run.path.name in finished and not arguments.quiet:
        print("finished earlier: nothing to do", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"run": str(run.path), **{k: run.records(k) for k in ("stage", "average")}}, indent=2))
        return 0
    if not arguments.quiet:
        print((run.path / "summary.md").read_text(), file=sys.stderr)
    print(run.path)
    return 0

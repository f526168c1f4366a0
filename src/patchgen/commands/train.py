"""patchgen train DATA --unseen NAME: one run folder, its path as the last line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from patchgen.commands import option, parse, settings_of
from patchgen.config import Config, load_config, preset_settings


@dataclass(frozen=True)
class TrainArguments(Config):
    """Train one method with one domain unseen, choose its checkpoint on the sources, score it on the unseen domain."""

    data: Annotated[str, tyro.conf.Positional]
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    preset: Literal["small", "paper"] = "small"
    """`small`: minutes on two cores. `paper`: the field's 5001 steps at 224 px."""
    config: str | None = None
    """YAML file of settings (such as a run's config.yaml) to start from instead of a preset."""
    out: str = "runs"
    """Parent of the run folder."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print the scores as JSON before the folder."""


def defaults(argv: list[str]) -> dict[str, Any]:
    """What the options start from: a file's settings, or a preset's."""
    path = option(argv, "--config", "")
    if path:
        return vars(load_config(path))
    preset = preset_settings(option(argv, "--preset", "small"), option(argv, "--method", Config.method))
    return {"data": tyro.MISSING, "unseen": tyro.MISSING, **preset}


def main(argv: list[str]) -> int:
    arguments = parse(TrainArguments, "train", argv, default=TrainArguments(**defaults(argv)))
    from patchgen.train.trainer import train

    run = train(settings_of(arguments, Config), arguments.out, quiet=arguments.quiet)
    if arguments.json:
        print(json.dumps(run.records("test"), indent=2))
    elif not arguments.quiet:
        print((run.path / "summary.md").read_text(), file=sys.stderr)
    print(Path(run.path))
    return 0
